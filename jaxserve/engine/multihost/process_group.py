"""What a process of a mesh knows of the others: it tells them, agrees with them, and ends when one of them ends.

Process 0 has a link to each follower, a follower one to process 0. Whoever is lost ends all: nothing that a mesh has
begun can go on without a part of it. The end comes from the links' threads, as the main thread may hang for ever in a
collective with a process that is gone.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import msgspec

from jaxserve.config.schema import EngineConfig
from jaxserve.engine.multihost.coordinator_proxy import open_tunnel
from jaxserve.engine.multihost.peer_connection import SILENCE, Kind, Link
from jaxserve.engine.multihost.rendezvous import Hall, carry, come
from jaxserve.errors import ConfigError

logger = logging.getLogger("jaxserve.engine")

_FAREWELL_TAKES = 5.0
_LAST_WORDS = 0.2
_CAUSE_COMES_WITHIN = 2.0


class Farewell(msgspec.Struct, frozen=True):
    """A process ends: `failed` unless the service was asked to end."""

    reason: str
    failed: bool


class News(msgspec.Struct, frozen=True):
    """What a process says of itself again and again: the compiles it made after it was ready."""

    compiles: int = 0


class Agreed(msgspec.Struct, frozen=True):
    """What process 0 made of everybody's values, or the error it raised."""

    value: Any = None
    refused: str | None = None


class Nodes:
    """This process among `count`, whose number is `rank`. `coordinator_port` of the loopback leads to jax's
    coordinator, `host` is the address by which the others reach this process."""

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
        """What this process tells the others of: its compiles after it was ready."""
        ranks = range(1, self.count) if self.is_leader else [0]
        self._links = [self._link(rank, connected) for rank, connected in zip(ranks, sockets, strict=True)]
        for link in self._links:
            link.start()

    @classmethod
    def meet(cls, config: EngineConfig, report: Callable[[str], None]) -> Self:
        """Find the others. `report` is told why this process ends, when another's end ends it.

        Raises `ConfigError` where one is missing or doesn't belong here.
        """
        if config.node_rank == 0:
            hall = Hall(config)
            return cls(config, hall.wait(), hall.coordinator_port, report)
        found, secret = come(config)
        address = config.dist_init_addr
        assert address is not None
        return cls(config, [found], open_tunnel(lambda: carry(address, secret)), report)

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0, which schedules."""
        return self.rank == 0

    @property
    def compiles_elsewhere(self) -> int:
        """Compiles that the others have made after they were ready, as far as is known here."""
        return sum(msgspec.msgpack.decode(link.heard, type=News).compiles for link in self._links if link.heard)

    def broadcast(self, command: bytes) -> None:
        """Tell every follower, without waiting; in order."""
        for link in self._links:
            link.send(Kind.COMMAND, command)

    def next_command(self) -> bytes:
        """Wait for what process 0 broadcasts next. Raises `EngineDeadError`."""
        [link] = self._links
        kind, body = link.receive()
        assert kind is Kind.COMMAND, kind
        return body

    def agree(self, own: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """What `decide` makes, on process 0, of everybody's values by rank; of what msgpack knows. All call it in the
        same order, and go on together. Raises `ConfigError` in all where `decide` does."""
        body = msgspec.msgpack.encode(own)
        if not self.is_leader:
            [link] = self._links
            link.send(Kind.VALUE, body)
            agreed = msgspec.msgpack.decode(link.receive()[1], type=Agreed)
            if agreed.refused is not None:
                self._is_leaving = True
                raise ConfigError(agreed.refused)
            return agreed.value
        values = [msgspec.msgpack.decode(one) for one in (body, *(link.receive()[1] for link in self._links))]
        try:
            agreed = Agreed(decide(values))
        except ConfigError as error:
            self._is_leaving = True
            self._tell(Kind.VALUE, Agreed(refused=str(error)))
            raise
        self._tell(Kind.VALUE, agreed)
        return agreed.value

    def get_ready(self) -> None:
        """Wait until all have come this far. From now on a process that is silent for long is lost: before, one may
        have been busy with what lets no other thread run."""
        self.agree(None, lambda _: None)
        for link in self._links:
            link.silence = SILENCE

    @contextmanager
    def within(self, seconds: float, what: str) -> Iterator[None]:
        """End everything where this takes longer."""
        timer = threading.Timer(seconds, self.fail, [f"{what} took more than {seconds:g} s"])
        timer.daemon = True
        timer.start()
        yield
        timer.cancel()

    def wait_for_cause(self) -> None:
        """Something failed here: where that is because another process has gone, its link ends this one meanwhile."""
        for link in self._links:
            link.lost.wait(_CAUSE_COMES_WITHIN / len(self._links))

    def fail_by_itself(self, reason: str) -> None:
        """`fail`, unless another's end turns out to be the cause."""
        self.wait_for_cause()
        self.fail(reason)

    def leave(self, reason: str, *, failed: bool = False) -> None:
        """Tell the others that this process ends, and wait a little until they have heard it."""
        if not self._ending.acquire(blocking=False):
            time.sleep(_FAREWELL_TAKES)  # another thread is ending this process
        self._is_leaving = True
        self._tell(Kind.FAREWELL, Farewell(reason, failed))
        deadline = time.monotonic() + _FAREWELL_TAKES
        for link in self._links:
            link.lost.wait(max(0.0, deadline - time.monotonic()))

    def fail(self, reason: str) -> None:
        """End this process, and the others with it, because of `reason`."""
        if not self._ending.acquire(blocking=False):
            return
        logger.error("This process of the mesh (node rank %d) ends: %s", self.rank, reason)
        self._report(reason)
        self._tell(Kind.FAREWELL, Farewell(reason, failed=True))
        time.sleep(_LAST_WORDS)  # the links' threads send it
        os._exit(1)

    def _link(self, rank: int, connected: socket.socket) -> Link:
        host, port = connected.getpeername()[:2]
        name = f"node rank {rank} ({host}, port {port})"
        return Link(
            connected,
            on_lost=lambda why: self._on_lost(f"{name} is lost: {why}"),
            on_farewell=lambda body: self._on_farewell(name, msgspec.msgpack.decode(body, type=Farewell)),
            news=lambda: msgspec.msgpack.encode(News(self.own_compiles())),
        )

    def _on_lost(self, reason: str) -> None:
        if not self._is_leaving:
            self.fail(reason)

    def _on_farewell(self, name: str, farewell: Farewell) -> None:
        if self._is_leaving:
            return
        if farewell.failed or self.is_leader:
            self.fail(f"{name} has ended: {farewell.reason}")
        elif self._ending.acquire(blocking=False):
            logger.info("The service has ended: %s", farewell.reason)
            os._exit(0)

    def _tell(self, kind: Kind, message: Farewell | Agreed) -> None:
        body = msgspec.msgpack.encode(message)
        for link in self._links:
            link.send(kind, body)
