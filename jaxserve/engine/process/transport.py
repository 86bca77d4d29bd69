"""The wire between API processes and the engine process: ZeroMQ over ipc, msgpack by msgspec.

One socket takes the commands of every API process; each API process has one of its own for what the engine tells it,
found by its index. Messages queue from the moment a socket connects, so neither side waits for the other to be there.
It moves messages; what they mean is `process`'s and `client`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec
import zmq

from jaxserve.api_types import EngineRequest, EngineStats, Profile, TokenEvent
from jaxserve.errors import InvalidRequestError


class Add(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Let these requests in."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End these requests; ids that are not open are ignored."""

    request_ids: list[str]


class ReadStats(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Audit the books and answer client `client` with a `StatsReading` of the same `number`."""

    client: int
    number: int


class FlushCache(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Empty the prefix cache and answer client `client` with a `CacheFlushed` of the same `number`."""

    client: int
    number: int


class StartProfile(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Record a profile, see `Profiling.start`; answered to client `client` with a `ProfileAnswer` of the same `number`
    once it records."""

    client: int
    number: int
    output_dir: str | None
    num_steps: int | None
    with_stack: bool


class StopProfile(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End the profile; answered like `StartProfile`, once its files are written."""

    client: int
    number: int


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End the engine process, whatever is open."""


class StepEvents(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All that a step brought for one API process."""

    events: list[TokenEvent]
    stats: EngineStats


class Idle(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine's sign of life while it has nothing to do."""


class StatsReading(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to `ReadStats`."""

    number: int
    stats: EngineStats


class CacheFlushed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to `FlushCache`: how many pages were given back."""

    number: int
    num_pages: int


class ProfileAnswer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to `StartProfile` and `StopProfile`."""

    number: int
    profile: Profile


class CommandFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to a command that could not be done; `refused` when it was wrong to ask, with `param` at fault."""

    number: int
    message: str
    refused: bool
    param: str | None = None


Command = Add | Abort | ReadStats | FlushCache | StartProfile | StopProfile | Shutdown
Question = ReadStats | FlushCache | StartProfile | StopProfile
Message = StepEvents | Idle | StatsReading | CacheFlushed | ProfileAnswer | CommandFailed


class Unreadable(msgspec.Struct, frozen=True):
    """A frame that is no command: what is wrong with it, and whom it leaves without an answer, as far as it says.

    `requests` are the client and the id of each request that it hands over, `question` the client and the number of
    what it asks.
    """

    problem: str
    requests: list[tuple[int, str]] = []
    question: tuple[int, int] | None = None


class _RequestHead(msgspec.Struct):
    request_id: str
    client: int = 0


class _AddHead(msgspec.Struct, array_like=True, tag="Add"):
    requests: list[_RequestHead]


class _QuestionHead(msgspec.Struct, array_like=True):
    kind: str
    client: int
    number: int


def _unreadable(frame: bytes, problem: Exception) -> Unreadable:
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        added = msgspec.msgpack.decode(frame, type=_AddHead)
        return Unreadable(str(problem), [(request.client, request.request_id) for request in added.requests])
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        asked = msgspec.msgpack.decode(frame, type=_QuestionHead)
        return Unreadable(str(problem), question=(asked.client, asked.number))
    return Unreadable(str(problem))


class _Endpoint:
    """A ZeroMQ context of one's own, so that closing it leaves nothing behind. A context manager."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()

    def close(self) -> None:
        """Close all sockets; what has not left yet is dropped."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        # A limit would make a sender wait, and nobody here may.
        socket.set_hwm(0)
        return socket


class EngineTransport(_Endpoint):
    """The engine's side. `lifeline` is a file descriptor that becomes readable when the parent is gone."""

    def __init__(self, command_address: str, client_addresses: Sequence[str], lifeline: int) -> None:
        super().__init__()
        self._commands = self._socket(zmq.PULL)
        self._commands.bind(command_address)
        self._clients = [self._socket(zmq.PUSH) for _ in client_addresses]
        for socket, address in zip(self._clients, client_addresses):
            socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._lifeline = lifeline
        self._poller = zmq.Poller()
        self._poller.register(self._commands, zmq.POLLIN)
        self._poller.register(lifeline, zmq.POLLIN)

    @property
    def num_clients(self) -> int:
        """API processes that can be addressed."""
        return len(self._clients)

    def receive(self, *, wait: bool, timeout: float | None = None) -> list[Command | Unreadable] | None:
        """Commands that have come; with `wait`, sleeps until there is one, or for `timeout` seconds. None when the
        parent is gone."""
        if wait and self._lifeline in dict(self._poller.poll(None if timeout is None else round(timeout * 1000))):
            return None
        commands: list[Command | Unreadable] = []
        while True:
            try:
                frame = self._commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return commands
            try:
                commands.append(self._decoder.decode(frame))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                commands.append(_unreadable(frame, error))

    def send(self, client: int, message: Message) -> None:
        """Queue a message to one API process."""
        self._clients[client].send(self._encoder.encode(message), zmq.NOBLOCK)


class ClientTransport(_Endpoint):
    """An API process's side. `fileno` becomes readable when messages may have come; `receive` then takes them all."""

    def __init__(self, command_address: str, client_address: str) -> None:
        super().__init__()
        self._messages = self._socket(zmq.PULL)
        self._messages.bind(client_address)
        self._commands = self._socket(zmq.PUSH)
        self._commands.connect(command_address)
        self._decoder = msgspec.msgpack.Decoder(Message)

    def fileno(self) -> int:
        """For an event loop to watch."""
        return self._messages.FD

    def receive(self) -> list[Message]:
        """Messages that have come, without waiting. The descriptor signals again only after this has emptied them."""
        messages: list[Message] = []
        while True:
            try:
                frame = self._messages.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(self._decoder.decode(frame))

    def send(self, command: Command) -> None:
        """Queue a command to the engine. Raises `InvalidRequestError` when it holds a number or a text that no message
        can."""
        try:
            frame = self._encoder.encode(command)
        except (OverflowError, UnicodeEncodeError) as error:
            raise InvalidRequestError(f"the engine can't be sent this: {error}") from error
        self._commands.send(frame, zmq.NOBLOCK)
