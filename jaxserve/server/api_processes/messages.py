"""Messages between the first process of a server and its API processes, and the channel that carries them."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import msgspec

from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.engine.client import EngineEndpoint
from jaxserve.framing import FrameFormat
from jaxserve.server.siblings import Question

_FRAMES = FrameFormat()


class Start(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All that the API process number `index` needs. It loads the model with the function that `loader` names as
    "module:function", and counts in files of the folder `metrics_dir`."""

    index: int
    engine_config: EngineConfig
    server_config: ServerConfig
    loader: str
    metrics_dir: str
    parent_pid: int


class EngineStarted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine is ready."""

    endpoints: list[EngineEndpoint]


class EngineEnded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine has ended unexpectedly."""

    reason: str


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Refuse new requests, finish the open ones and answer `Drained`."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End, since all have drained or the server can't start."""


class Asked(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A question of the API process `asker`; the answer is an `Answered` with the same two numbers."""

    asker: int
    number: int
    question: Question


class Answers(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answers to an `Ask`, of all API processes that have not ended meanwhile."""

    number: int
    answers: list[Any]


class ReceivedUpdate(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A placement update of the API process `origin`."""

    origin: int
    update: bytes


class SiblingEnded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The API process `index` has ended."""

    index: int


class ModelFetched(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The files of the model are on this machine: process 0 tells its parent, which tells the others."""


class EngineWanted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The API process waits for the engine, which may start now."""


class Listening(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The API process answers HTTP, though the model may still load. It says so again every second."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The API process serves requests."""


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The API process can't serve; the server ends with this exit code."""

    message: str
    exit_code: int


class Drained(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The API process has no open request after a `Drain`."""


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A question to all other API processes, answered by `Answers`."""

    number: int
    question: Question


class Answered(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to an `Asked`."""

    asker: int
    number: int
    answer: Any


class SentUpdate(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A placement update for all other API processes."""

    update: bytes


ToChild = (
    Start | ModelFetched | EngineStarted | EngineEnded | Drain | Stop | Asked | Answers | ReceivedUpdate | SiblingEnded
)
ToParent = ModelFetched | EngineWanted | Listening | Ready | StartFailed | Drained | Ask | Answered | SentUpdate


class Channel[Sent, Received]:
    """One end of a pair of sockets, on one asyncio loop. `kind` is the union of the messages that it receives."""

    def __init__(self, kind: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._decoder = msgspec.msgpack.Decoder(cast(Any, kind))
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, kind: object, end: socket.socket) -> Channel[Sent, Received]:
        """Return the channel over this end."""
        return cls(kind, *await asyncio.open_connection(sock=end))

    def send(self, message: Sent) -> None:
        """Queue a message; it is dropped if the other end is closed."""
        if not self._writer.is_closing():
            self._writer.write(_FRAMES.encode(msgspec.msgpack.encode(message)))

    async def receive(self) -> Received | None:
        """Wait for the next message; return None when the other end is closed."""
        try:
            _, body = await _FRAMES.read_from(self._reader)
        except (EOFError, OSError):
            return None
        return cast(Received, self._decoder.decode(body))

    def close(self) -> None:
        """Close this end."""
        self._writer.close()
