"""How the processes of a mesh connect: process 0 listens at `--dist-init-addr`, followers join there, and a follower
that doesn't fit this service is refused with the reason.

The result is one connected socket between process 0 and each follower. After that the same port takes the followers'
connections to the jax coordinator (`coordinator_proxy`).
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

from jaxserve import host
from jaxserve.config.processes import parse_address
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.multihost.coordinator_proxy import forward_to_coordinator
from jaxserve.engine.multihost.handshake import (
    Acknowledged,
    AllJoined,
    DialRequest,
    HandshakeReply,
    HandshakeRequest,
    JoinRefused,
    JoinRequest,
    receive,
    send,
    shared_facts,
)
from jaxserve.error_texts import join_differences
from jaxserve.errors import ConfigError

logger = logging.getLogger("jaxserve.engine")

_HANDSHAKE_TIMEOUT = 10.0
_RETRY_INTERVAL = 0.3
_WAITING_LOG_INTERVAL = 30.0


class RendezvousServer:
    """The side of process 0. It listens from its construction until this process ends, and raises `ConfigError` when it
    can't listen at `dist_init_addr`."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.dist_init_addr is not None
        self._config = config
        self._facts = shared_facts(config)
        self._address = config.dist_init_addr
        self._secret = secrets.token_hex(16)
        self.coordinator_port = host.free_port()
        self._joined: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        self._is_open = True
        self._last_refusal = ""
        self._listener = _listen(self._address)
        threading.Thread(target=self._accept, name="jaxserve-rendezvous", daemon=True).start()

    def wait_for_all(self) -> list[socket.socket]:
        """Return a socket to each follower, by rank. Raises `ConfigError` when one hasn't joined in `dist_timeout`."""
        timeout, nnodes = self._config.dist_timeout, self._config.nnodes
        deadline = time.monotonic() + timeout
        logger.info("Waiting at %s for %d more of %d processes, up to %g s",
                    self._address, nnodes - 1, nnodes, timeout)  # fmt: skip
        with self._changed:
            while missing := [rank for rank in range(1, nnodes) if not self._has_joined(rank)]:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._give_up(missing, timeout)
                if not self._changed.wait(min(left, _WAITING_LOG_INTERVAL)):
                    logger.info("Still waiting at %s for %s", self._address, _ranks(missing))
            self._is_open = False
            for joined in self._joined.values():
                with contextlib.suppress(OSError):  # a follower that has just died is detected by `PeerConnection`
                    send(joined, AllJoined(self._secret))
            return [self._joined[rank] for rank in range(1, nnodes)]

    def _has_joined(self, rank: int) -> bool:
        """Return whether this follower has joined and still waits."""
        joined = self._joined.get(rank)
        if joined is not None and _has_ended(joined):
            self._joined.pop(rank).close()
            joined = None
        return joined is not None

    def _give_up(self, missing: list[int], timeout: float) -> None:
        self._is_open = False
        refusal = f"; the last process that tried to join was refused: {self._last_refusal}"
        message = (
            f"{_ranks(missing)} of nnodes={self._config.nnodes} did not join at dist_init_addr={self._address} within "
            f"dist_timeout={timeout:g} s{refusal if self._last_refusal else ''}. Start one `jaxserve serve` for each, "
            "with its own --node-rank"
        )
        for joined in self._joined.values():
            with contextlib.suppress(OSError):
                send(joined, JoinRefused(message))
        raise ConfigError(message)

    def _accept(self) -> None:
        while True:
            connected, address = self._listener.accept()
            arguments = (connected, _place(address))
            threading.Thread(target=self._handle, args=arguments, name="jaxserve-rendezvous", daemon=True).start()

    def _handle(self, connected: socket.socket, place: str) -> None:
        try:
            connected.settimeout(_HANDSHAKE_TIMEOUT)
            request = receive(connected, HandshakeRequest)
            match request:
                case DialRequest(secret) if secrets.compare_digest(secret.encode(), self._secret.encode()):
                    forward_to_coordinator(connected, self.coordinator_port)
                    return
                case JoinRequest():
                    problem = self._admit(request, connected)
                case _:
                    problem = "its secret is not that of this service"
        except (OSError, ValueError) as error:
            logger.warning(
                "%s connected to %s and is no process of this service: %s; ignored", place, self._address, error
            )
            connected.close()
            return
        if problem is None:
            logger.info("Node rank %d has joined from %s", request.node_rank, place)
            return
        self._last_refusal = problem
        logger.warning("Refused a process at %s: %s", place, problem)
        with contextlib.suppress(OSError):
            send(connected, JoinRefused(problem))
        connected.close()

    def _admit(self, request: JoinRequest, connected: socket.socket) -> str | None:
        """Add a follower, or return why it is refused."""
        rank = request.node_rank
        facts = msgspec.msgpack.decode(msgspec.msgpack.encode(self._facts))
        if differences := join_differences(request.facts, facts, there="there", here="on node rank 0"):
            return f"node_rank={rank} was started with other settings: {differences}"
        with self._changed:
            if not 0 < rank < self._config.nnodes:
                return f"node_rank={rank} is not in [1, {self._config.nnodes - 1}]"
            if not self._is_open:
                return f"node_rank={rank} came too late: this service has started or given up; restart all its nodes"
            if self._has_joined(rank):
                return f"node_rank={rank} has joined already, from {_place(self._joined[rank].getpeername())}"
            send(connected, Acknowledged())
            self._joined[rank] = connected
            self._changed.notify()
        return None


def join(config: EngineConfig) -> tuple[socket.socket, str]:
    """Join as a follower: connect to process 0 and wait until all have joined. Return the socket and the secret for
    `dial`.

    Raises `ConfigError` when that takes longer than `dist_timeout`, or process 0 refuses this process.
    """
    assert config.dist_init_addr is not None
    deadline = time.monotonic() + config.dist_timeout
    request = JoinRequest(config.node_rank, shared_facts(config))
    where = f"dist_init_addr={config.dist_init_addr}"
    logger.info("Connecting to node rank 0 at %s, for up to %g s", config.dist_init_addr, config.dist_timeout)
    problem, acknowledged = "no attempt was made", False
    while (left := deadline - time.monotonic()) > 0:
        try:
            with contextlib.ExitStack() as on_error:
                connected = on_error.enter_context(_connect(config.dist_init_addr, min(left, _HANDSHAKE_TIMEOUT)))
                send(connected, request)
                reply = receive(connected, HandshakeReply)
                if isinstance(reply, Acknowledged):
                    logger.info("Connected to node rank 0; waiting for the other processes")
                    problem, acknowledged = "it answered, but not all processes have joined", True
                    # Process 0 has its own deadline, and says so when it gives up.
                    connected.settimeout(max(deadline - time.monotonic(), 0.0) + _HANDSHAKE_TIMEOUT)
                    reply = receive(connected, HandshakeReply)
                if isinstance(reply, JoinRefused):
                    raise ConfigError(f"node rank 0 at {config.dist_init_addr} says: {reply.message}")
                assert isinstance(reply, AllJoined)
                on_error.pop_all()
                return connected, reply.secret
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(
                f"{where}: the program that answers there is no `jaxserve serve` of node rank 0 ({error})"
            ) from None
        except OSError as error:
            problem = problem if acknowledged and isinstance(error, TimeoutError) else str(error)
            time.sleep(min(_RETRY_INTERVAL, max(0.0, deadline - time.monotonic())))
    raise ConfigError(
        f"{where}: node rank 0 did not accept this process within dist_timeout={config.dist_timeout:g} s ({problem}). "
        "Start it there with --node-rank 0, and check that the address is its own and the port is open"
    )


def dial(address: str, secret: str) -> socket.socket:
    """Open a connection that process 0 forwards to its coordinator. Raises `OSError`."""
    connected = _connect(address, _HANDSHAKE_TIMEOUT)
    send(connected, DialRequest(secret))
    return connected


def _listen(address: str) -> socket.socket:
    place = parse_address(address)
    try:
        family, *_ = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place, family=family, backlog=128)
    except OSError as error:
        raise ConfigError(
            f"dist_init_addr={address}: node rank 0 can't listen there ({error}); it must be an address of this "
            "machine, and a port that is free"
        ) from error


def _connect(address: str, timeout: float) -> socket.socket:
    connected = socket.create_connection(parse_address(address), timeout)
    if connected.getsockname() == connected.getpeername():
        # Without a listener, the kernel may choose the port as our own and connect the socket to itself.
        connected.close()
        raise ConnectionRefusedError("no process listens there")
    return connected


def _has_ended(connected: socket.socket) -> bool:
    """Return whether the follower is gone: it sends nothing before it is answered, so readable means ended."""
    return bool(select.select([connected], [], [], 0)[0])


def _place(address: tuple[Any, ...]) -> str:
    name, port = address[:2]
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def _ranks(ranks: list[int]) -> str:
    return f"node rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
