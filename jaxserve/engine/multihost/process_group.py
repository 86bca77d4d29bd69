"""The processes of a mesh as seen by one of them: messages, values they agree on, and the end of all when one ends.

Process 0 is connected to each follower, a follower only to process 0. When one process is lost, all end, because a mesh
can't continue without a part of it. Threads of the connections end the process, as the main thread may be blocked
forever in a collective with the process that is gone.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import msgspec

from jaxserve.api_types import StageTimes
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.multihost.coordinator_proxy import start_proxy
from jaxserve.engine.multihost.peer_connection import SILENCE_TIMEOUT, MessageKind, PeerConnection
from jaxserve.engine.multihost.rendezvous import RendezvousServer, dial, join
from jaxserve.errors import ConfigError

logger = logging.getLogger("jaxserve.engine")

_LEAVE_TIMEOUT = 5.0
_SEND_TIME = 0.2
_CAUSE_TIMEOUT = 2.0


class ProcessExit(msgspec.Struct, frozen=True):
    """A process ends: `failed` unless the service was asked to end."""

    reason: str
    failed: bool


class ProcessStatus(msgspec.Struct, frozen=True):
    """The content of a heartbeat: the number of compiles that the process made after it was ready, and the times of the
    pipeline stages that it has, by number."""

    compiles: int = 0
    stages: dict[int, StageTimes] = {}


class Decision(msgspec.Struct, frozen=True):
    """The value that process 0 decided on, or the error that it raised instead."""

    value: Any = None
    error: str | None = None


class ProcessGroup:
    """This process, number `rank` of `count`, and its connections to the others. `coordinator_port` of the loopback
    leads to jax's coordinator, `host` is the address by which the others reach this process."""

    def __init__(
        self,
        config: EngineConfig,
        sockets: Sequence[socket.socket],
        coordinator_port: int,
        report: Callable[[str], None],
    ) -> None:
        self.rank = config.node_rank
        self.count = config.nnodes
        self.coordinator_port = coordinator_port
        self.host: str = sockets[0].getsockname()[0]
        self._report = report
        self._ending = threading.Lock()
        self._is_leaving = False
        self.own_compiles: Callable[[], int] = int
        """Returns the compiles of this process after it was ready, for the others to know."""
        self.own_stage_times: Callable[[], Mapping[int, StageTimes]] = dict
        """Returns the times of the pipeline stages of this process, for the others to know."""
        ranks = range(1, self.count) if self.is_leader else [0]
        self._peers = [self._peer(rank, connected) for rank, connected in zip(ranks, sockets, strict=True)]
        for peer in self._peers:
            peer.start()

    @classmethod
    def connect(cls, config: EngineConfig, report: Callable[[str], None]) -> Self:
        """Connect to the others. `report` gets the reason when the loss of another process ends this one.

        Raises `ConfigError` where one is missing or refused.
        """
        if config.node_rank == 0:
            server = RendezvousServer(config)
            return cls(config, server.wait_for_all(), server.coordinator_port, report)
        connected, secret = join(config)
        address = config.dist_init_addr
        assert address is not None
        return cls(config, [connected], start_proxy(lambda: dial(address, secret)), report)

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0, which schedules."""
        return self.rank == 0

    @property
    def peer_compiles(self) -> int:
        """Compiles that connected processes have made after they were ready, as of their last heartbeats."""
        return sum(status.compiles for status in self._statuses())

    @property
    def peer_stage_times(self) -> dict[int, StageTimes]:
        """The times of the pipeline stages of connected processes by number, as of their last heartbeats."""
        return {number: times for status in self._statuses() for number, times in status.stages.items()}

    def _statuses(self) -> list[ProcessStatus]:
        statuses = [peer.peer_status for peer in self._peers]
        return [msgspec.msgpack.decode(status, type=ProcessStatus) for status in statuses if status]

    def broadcast(self, command: bytes) -> None:
        """Send a command to every follower, in order and without waiting."""
        for peer in self._peers:
            peer.send(MessageKind.COMMAND, command)

    def next_command(self) -> bytes:
        """Wait for the next command of process 0. Raises `EngineDeadError` when it is lost."""
        [leader] = self._peers
        kind, body = leader.receive()
        assert kind is MessageKind.COMMAND, kind
        return body

    def agree(self, own: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Return what `decide` makes, on process 0, of every process's `own` value, ordered by rank.

        Values are what msgpack can encode. Every process calls this in the same order and waits for the result. Raises
        `ConfigError` in all of them where `decide` does.
        """
        body = msgspec.msgpack.encode(own)
        if not self.is_leader:
            [leader] = self._peers
            leader.send(MessageKind.VALUE, body)
            decision = msgspec.msgpack.decode(leader.receive()[1], type=Decision)
            if decision.error is not None:
                self._is_leaving = True
                raise ConfigError(decision.error)
            return decision.value
        values = [msgspec.msgpack.decode(one) for one in (body, *(peer.receive()[1] for peer in self._peers))]
        try:
            decision = Decision(decide(values))
        except ConfigError as error:
            self._is_leaving = True
            self._send_all(MessageKind.VALUE, Decision(error=str(error)))
            raise
        self._send_all(MessageKind.VALUE, decision)
        return decision.value

    def wait_until_all_ready(self) -> None:
        """Wait until every process has come this far, then shorten the time after which a silent one counts as lost:
        start-up may let no other thread run for long."""
        self.agree(None, lambda _: None)
        for peer in self._peers:
            peer.silence_timeout = SILENCE_TIMEOUT

    @contextmanager
    def time_limit(self, seconds: float, what: str) -> Iterator[None]:
        """End all processes when the block takes longer; `what` describes it in the reason."""
        timer = threading.Timer(seconds, self.fail, [f"{what} took more than {seconds:g} s"])
        timer.daemon = True
        timer.start()
        yield
        timer.cancel()

    def wait_for_cause(self) -> None:
        """Wait a little after an error here: if a lost process caused it, that loss ends this process meanwhile."""
        for peer in self._peers:
            peer.lost.wait(_CAUSE_TIMEOUT / len(self._peers))

    def fail_after_cause(self, reason: str) -> None:
        """Call `fail` with `reason`, unless a lost process turns out to be the cause."""
        self.wait_for_cause()
        self.fail(reason)

    def leave(self, reason: str, *, failed: bool = False) -> None:
        """Tell the others that this process ends, and wait a few seconds until they have ended too."""
        if not self._ending.acquire(blocking=False):
            time.sleep(_LEAVE_TIMEOUT)  # another thread is ending this process
        self._is_leaving = True
        self._send_all(MessageKind.EXIT, ProcessExit(reason, failed))
        deadline = time.monotonic() + _LEAVE_TIMEOUT
        for peer in self._peers:
            peer.lost.wait(max(0.0, deadline - time.monotonic()))

    def fail(self, reason: str) -> None:
        """End this process, and the others with it, because of `reason`."""
        if not self._ending.acquire(blocking=False):
            return
        logger.error("This process of the mesh (node rank %d) ends: %s", self.rank, reason)
        self._report(reason)
        self._send_all(MessageKind.EXIT, ProcessExit(reason, failed=True))
        time.sleep(_SEND_TIME)  # the connections' threads send it
        os._exit(1)

    def _peer(self, rank: int, connected: socket.socket) -> PeerConnection:
        host, port = connected.getpeername()[:2]
        name = f"node rank {rank} ({host}, port {port})"
        return PeerConnection(
            connected,
            on_lost=lambda reason: self._on_lost(f"{name} is lost: {reason}"),
            on_exit=lambda body: self._on_exit(name, msgspec.msgpack.decode(body, type=ProcessExit)),
            own_status=lambda: msgspec.msgpack.encode(self._status()),
        )

    def _status(self) -> ProcessStatus:
        return ProcessStatus(self.own_compiles(), dict(self.own_stage_times()))

    def _on_lost(self, reason: str) -> None:
        if not self._is_leaving:
            self.fail(reason)

    def _on_exit(self, name: str, message: ProcessExit) -> None:
        if self._is_leaving:
            return
        if message.failed or self.is_leader:
            self.fail(f"{name} has ended: {message.reason}")
        elif self._ending.acquire(blocking=False):
            logger.info("The service has ended: %s", message.reason)
            os._exit(0)

    def _send_all(self, kind: MessageKind, message: ProcessExit | Decision) -> None:
        body = msgspec.msgpack.encode(message)
        for peer in self._peers:
            peer.send(kind, body)
