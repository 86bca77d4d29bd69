"""Messages between API processes and the engine process: ZeroMQ over ipc, msgpack by msgspec.

One socket takes the commands of all API processes; each API process has a socket for the engine's messages, addressed
by its index. Messages queue from the moment a socket connects, so neither side waits for the other to start. This
module only moves messages: `process.main` and `engine.client` act on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec
import zmq

from jaxserve.api_types import EngineRequest, EngineStats, ProfileInfo, TokenEvent
from jaxserve.errors import InvalidRequestError


class Add(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Add these requests."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Abort these requests; ids of requests that are not open are ignored."""

    request_ids: list[str]


class ReadStats(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Check the engine's state and answer client `client` with a `StatsReading` of the same `number`."""

    client: int
    number: int


class FlushCache(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Empty the prefix cache and answer client `client` with a `CacheFlushed` of the same `number`."""

    client: int
    number: int


class StartProfile(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Start a profile, see `Profiling.start`, and answer client `client` with a `ProfileAnswer` of the same `number`
    once it is recording."""

    client: int
    number: int
    output_dir: str | None
    num_steps: int | None
    with_stack: bool


class StopProfile(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Stop the profile and answer like `StartProfile`, once its files are written."""

    client: int
    number: int


class ForgetClient(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Abort all requests of client `client`, whose process has ended."""

    client: int


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End the engine process, even if requests are open."""


class StepEvents(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The events that one step produced for one API process, and the metrics after it."""

    events: list[TokenEvent]
    stats: EngineStats


class Idle(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A heartbeat of the engine while it has nothing to do."""


class StatsReading(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to `ReadStats`."""

    number: int
    stats: EngineStats


class CacheFlushed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to `FlushCache`: the number of pages that were freed."""

    number: int
    num_pages: int


class ProfileAnswer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to `StartProfile` and `StopProfile`."""

    number: int
    profile: ProfileInfo


class CommandFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to a query that failed; `refused` when the query itself was invalid, in its parameter `param`."""

    number: int
    message: str
    refused: bool
    param: str | None = None


Command = Add | Abort | ReadStats | FlushCache | StartProfile | StopProfile | ForgetClient | Shutdown
Query = ReadStats | FlushCache | StartProfile | StopProfile
Message = StepEvents | Idle | StatsReading | CacheFlushed | ProfileAnswer | CommandFailed


class UndecodableCommand(msgspec.Struct, frozen=True):
    """A message that can't be decoded as a command: the problem, and the clients that wait for an answer to it, as far
    as they can be read.

    `requests` holds the client and the id of each request that it adds, `query` the client and the number of a query.
    """

    problem: str
    requests: list[tuple[int, str]] = []
    query: tuple[int, int] | None = None


class _PartialRequest(msgspec.Struct):
    request_id: str
    client: int = 0


class _PartialAdd(msgspec.Struct, array_like=True, tag="Add"):
    requests: list[_PartialRequest]


class _PartialQuery(msgspec.Struct, array_like=True):
    kind: str
    client: int
    number: int


def _undecodable(message: bytes, problem: Exception) -> UndecodableCommand:
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        added = msgspec.msgpack.decode(message, type=_PartialAdd)
        return UndecodableCommand(str(problem), [(request.client, request.request_id) for request in added.requests])
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        query = msgspec.msgpack.decode(message, type=_PartialQuery)
        return UndecodableCommand(str(problem), query=(query.client, query.number))
    return UndecodableCommand(str(problem))


class _Endpoint:
    """Sockets in a ZeroMQ context of their own, so that closing it frees them all; a Python context manager."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()

    def close(self) -> None:
        """Close all sockets; messages not sent yet are dropped."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        # With a limit on queued messages, a sender could block.
        socket.set_hwm(0)
        return socket


class EngineTransport(_Endpoint):
    """The engine's side. `parent_pipe` is a file descriptor that becomes readable when the parent ends."""

    def __init__(self, command_address: str, client_addresses: Sequence[str], parent_pipe: int) -> None:
        super().__init__()
        self._commands = self._socket(zmq.PULL)
        self._commands.bind(command_address)
        self._clients = [self._socket(zmq.PUSH) for _ in client_addresses]
        for socket, address in zip(self._clients, client_addresses):
            socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._parent_pipe = parent_pipe
        self._poller = zmq.Poller()
        self._poller.register(self._commands, zmq.POLLIN)
        self._poller.register(parent_pipe, zmq.POLLIN)

    @property
    def num_clients(self) -> int:
        """The number of API processes."""
        return len(self._clients)

    def receive(self, *, wait: bool, timeout: float | None = None) -> list[Command | UndecodableCommand] | None:
        """Return the commands that have arrived; with `wait`, wait for one, at most `timeout` seconds. Return None when
        the parent has ended."""
        if wait and self._parent_pipe in dict(self._poller.poll(None if timeout is None else round(timeout * 1000))):
            return None
        commands: list[Command | UndecodableCommand] = []
        while True:
            try:
                message = self._commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return commands
            try:
                commands.append(self._decoder.decode(message))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                commands.append(_undecodable(message, error))

    def send(self, client: int, message: Message) -> None:
        """Queue a message to one API process."""
        self._clients[client].send(self._encoder.encode(message), zmq.NOBLOCK)


class CommandTransport(_Endpoint):
    """The side of a process that sends commands and expects no messages."""

    def __init__(self, command_address: str) -> None:
        super().__init__()
        self._commands = self._socket(zmq.PUSH)
        self._commands.connect(command_address)

    def send(self, command: Command) -> None:
        """Queue a command to the engine. Raises `InvalidRequestError` when it holds a number or a text that can't be
        encoded."""
        try:
            message = self._encoder.encode(command)
        except (OverflowError, UnicodeEncodeError) as error:
            raise InvalidRequestError(f"this can't be sent to the engine: {error}") from error
        self._commands.send(message, zmq.NOBLOCK)


class ClientTransport(CommandTransport):
    """An API process's side. `fileno` becomes readable when messages may have arrived; then call `receive`."""

    def __init__(self, command_address: str, client_address: str) -> None:
        super().__init__(command_address)
        self._messages = self._socket(zmq.PULL)
        self._messages.bind(client_address)
        self._decoder = msgspec.msgpack.Decoder(Message)

    def fileno(self) -> int:
        """Return the descriptor for an event loop to watch."""
        return self._messages.FD

    def receive(self) -> list[Message]:
        """Return the messages that have arrived, without waiting. The descriptor signals again only after this call."""
        messages: list[Message] = []
        while True:
            try:
                message = self._messages.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(self._decoder.decode(message))
