"""How the processes of a mesh find each other: process 0 listens at `--dist-init-addr`, the others come and say who
they are, and whoever doesn't belong is told why.

It owns the port and the greeting. What comes out is one connected socket for each pair of process 0 and a follower;
later on the same port takes their connections to the jax coordinator (`tunnel`).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import select
import socket
import threading
import time
from typing import Any

import msgspec

from jaxserve.config.processes import parse_address
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.multihost.coordinator_proxy import end_tunnel, free_port
from jaxserve.engine.multihost.handshake import (
    Answer,
    Carry,
    Complete,
    Hello,
    Join,
    Noted,
    Refused,
    differences,
    facts_of,
    listed,
    receive,
    send,
)
from jaxserve.errors import ConfigError

logger = logging.getLogger("jaxserve.engine")

_GREETING_TAKES = 10.0
_RETRY = 0.3
_REMIND = 30.0


class Hall:
    """Process 0's side: the port, from before the others come until this process ends. Raises `ConfigError` where it
    can't be had."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.dist_init_addr is not None
        self._config = config
        self._facts = facts_of(config)
        self._address = config.dist_init_addr
        self._secret = secrets.token_hex(16)
        self.coordinator_port = free_port()
        self._joined: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        self._is_open = True
        self._last_refusal = ""
        self._listener = _listen(self._address)
        threading.Thread(target=self._accept, name="jaxserve-meeting", daemon=True).start()

    def wait(self) -> list[socket.socket]:
        """A socket of each follower, by rank. Raises `ConfigError` when one hasn't come within `dist_timeout`."""
        timeout, nnodes = self._config.dist_timeout, self._config.nnodes
        deadline = time.monotonic() + timeout
        logger.info("Waiting at %s for %d more of %d processes, up to %g s",
                    self._address, nnodes - 1, nnodes, timeout)  # fmt: skip
        with self._changed:
            while missing := [rank for rank in range(1, nnodes) if not self._is_here(rank)]:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._give_up(missing, timeout)
                if not self._changed.wait(min(left, _REMIND)):
                    logger.info("Still waiting at %s for %s", self._address, _ranks(missing))
            self._is_open = False
            for joined in self._joined.values():
                with contextlib.suppress(OSError):  # who has just died is found out by its link
                    send(joined, Complete(self._secret))
            return [self._joined[rank] for rank in range(1, nnodes)]

    def _is_here(self, rank: int) -> bool:
        """Whether it has come, and waits still."""
        joined = self._joined.get(rank)
        if joined is not None and _has_ended(joined):
            self._joined.pop(rank).close()
            joined = None
        return joined is not None

    def _give_up(self, missing: list[int], timeout: float) -> None:
        self._is_open = False
        why = f"; the last that came was sent away: {self._last_refusal}" if self._last_refusal else ""
        message = (
            f"{_ranks(missing)} of nnodes={self._config.nnodes} did not come to dist_init_addr={self._address} within "
            f"dist_timeout={timeout:g} s{why}. Start one `jaxserve serve` for each, with its own --node-rank"
        )
        for joined in self._joined.values():
            with contextlib.suppress(OSError):
                send(joined, Refused(message))
        raise ConfigError(message)

    def _accept(self) -> None:
        while True:
            guest, address = self._listener.accept()
            threading.Thread(target=self._greet, args=(guest, address), name="jaxserve-meeting", daemon=True).start()

    def _greet(self, guest: socket.socket, address: tuple[Any, ...]) -> None:
        who = _place(address)
        try:
            guest.settimeout(_GREETING_TAKES)
            hello = receive(guest, Hello)
            match hello:
                case Carry(secret) if secrets.compare_digest(secret.encode(), self._secret.encode()):
                    end_tunnel(guest, self.coordinator_port)
                    return
                case Join():
                    problem = self._seat(hello, guest)
                case _:
                    problem = "its secret is not that of this service"
        except (OSError, ValueError) as error:
            logger.warning("%s came to %s and is no process of this service: %s", who, self._address, error)
            guest.close()
            return
        if problem is None:
            logger.info("Node rank %d is here, from %s", hello.node_rank, who)
            return
        self._last_refusal = problem
        logger.warning("A process at %s was sent away: %s", who, problem)
        with contextlib.suppress(OSError):
            send(guest, Refused(problem))
        guest.close()

    def _seat(self, hello: Join, guest: socket.socket) -> str | None:
        """Take a follower in, or say why not."""
        rank = hello.node_rank
        if problem := _difference(hello, self._facts):
            return problem
        with self._changed:
            if not 0 < rank < self._config.nnodes:
                return f"node_rank={rank} is not in [1, {self._config.nnodes - 1}]"
            if not self._is_open:
                return f"node_rank={rank} comes too late: this service has started, or has given up; start it anew"
            if self._is_here(rank):
                return f"node_rank={rank} is here already, from {_place(self._joined[rank].getpeername())}"
            send(guest, Noted())
            self._joined[rank] = guest
            self._changed.notify()
        return None


def come(config: EngineConfig) -> tuple[socket.socket, str]:
    """A follower's side: find process 0, be taken in, wait until all are there. The socket, and the tunnels' secret.

    Raises `ConfigError` where that fails within `dist_timeout`, or this process is sent away.
    """
    assert config.dist_init_addr is not None
    deadline = time.monotonic() + config.dist_timeout
    hello = Join(config.node_rank, facts_of(config))
    where = f"dist_init_addr={config.dist_init_addr}"
    logger.info("Looking for node rank 0 at %s, up to %g s", config.dist_init_addr, config.dist_timeout)
    problem, answered = "it was not tried", False
    while (left := deadline - time.monotonic()) > 0:
        try:
            with contextlib.ExitStack() as undo:
                found = undo.enter_context(_connect(config.dist_init_addr, min(left, _GREETING_TAKES)))
                send(found, hello)
                answer = receive(found, Answer)
                if isinstance(answer, Noted):
                    logger.info("Node rank 0 is there; waiting for the others")
                    problem, answered = "it is there, but not all others are", True
                    # It has its own deadline, and says so when it gives up.
                    found.settimeout(max(deadline - time.monotonic(), 0.0) + _GREETING_TAKES)
                    answer = receive(found, Answer)
                if isinstance(answer, Refused):
                    raise ConfigError(f"node rank 0 at {config.dist_init_addr} says: {answer.message}")
                assert isinstance(answer, Complete)
                undo.pop_all()
                return found, answer.secret
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{where}: who answers there is no `jaxserve serve` of node rank 0 ({error})") from None
        except OSError as error:
            problem = problem if answered and isinstance(error, TimeoutError) else str(error)
            time.sleep(min(_RETRY, max(0.0, deadline - time.monotonic())))
    raise ConfigError(
        f"{where}: node rank 0 did not let this process in within dist_timeout={config.dist_timeout:g} s ({problem}). "
        "Start it there with --node-rank 0, and check that the address is its own and the port is open"
    )


def carry(address: str, secret: str) -> socket.socket:
    """A connection that process 0 carries on to its coordinator. Raises `OSError`."""
    tunnel = _connect(address, _GREETING_TAKES)
    send(tunnel, Carry(secret))
    return tunnel


def _difference(hello: Join, ours: dict[str, Any]) -> str | None:
    found = differences(hello.facts, msgspec.msgpack.decode(msgspec.msgpack.encode(ours)))
    return f"node_rank={hello.node_rank} was started otherwise: {listed(found)}" if found else None


def _listen(address: str) -> socket.socket:
    host, port = parse_address(address)
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(
            f"dist_init_addr={address}: node rank 0 can't listen there ({error}); it must be an address of this "
            "machine, and a port that is free"
        ) from error


def _connect(address: str, timeout: float) -> socket.socket:
    connected = socket.create_connection(parse_address(address), timeout)
    if connected.getsockname() == connected.getpeername():
        connected.close()  # a port of our own range may be given to us while nobody listens on it
        raise ConnectionRefusedError("nobody listens there")
    return connected


def _has_ended(connected: socket.socket) -> bool:
    """Whether the other end, who has nothing to say yet, is gone."""
    return bool(select.select([connected], [], [], 0)[0])


def _place(address: tuple[Any, ...]) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _ranks(ranks: list[int]) -> str:
    return f"node rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
