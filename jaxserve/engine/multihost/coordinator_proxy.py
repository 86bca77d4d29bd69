"""Forwards a follower's connections to the jax coordinator, which listens only on the loopback of process 0, through
the rendezvous port. So one port is open between nodes, and only processes of this service reach the coordinator.

A tunnel that breaks keeps the follower's connection to jax open: jax ends a process at once when its coordinator is
gone, before the log could say why. `PeerConnection` reports which process is lost.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

_READ_BYTES = 1 << 16
_COORDINATOR_TIMEOUT = 60.0
_RETRY_INTERVAL = 0.1


def start_proxy(connect: Callable[[], socket.socket]) -> int:
    """Listen on the loopback, forward each connection through a new one from `connect`, and return the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]

    def accept() -> None:
        while True:
            local, _ = listener.accept()
            try:
                remote = connect()
            except OSError:
                continue  # `local` stays open: see the module's docstring
            relay(local, remote)

    threading.Thread(target=accept, name="jaxserve-tunnel", daemon=True).start()
    return port


def forward_to_coordinator(remote: socket.socket, port: int) -> None:
    """Forward a follower's connection to the coordinator on this process's loopback, which may not listen yet."""
    deadline = time.monotonic() + _COORDINATOR_TIMEOUT
    while True:
        try:
            local = socket.create_connection(("127.0.0.1", port))
        except OSError:
            if time.monotonic() > deadline:
                remote.close()
                return
            time.sleep(_RETRY_INTERVAL)
        else:
            relay(remote, local)
            return


def relay(near: socket.socket, far: socket.socket) -> None:
    """Copy bytes both ways. When `near` ends, `far` is closed; when `far` ends, `near` stays open."""
    for one in (near, far):
        one.settimeout(None)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=_copy, args=(near, far, True), name="jaxserve-tunnel", daemon=True).start()
    threading.Thread(target=_copy, args=(far, near, False), name="jaxserve-tunnel", daemon=True).start()


def _copy(source: socket.socket, target: socket.socket, close_both: bool) -> None:
    """Copy until `source` ends, then close both if `close_both`. Bytes that `target` doesn't take are dropped."""
    with contextlib.suppress(OSError):
        while part := source.recv(_READ_BYTES):
            with contextlib.suppress(OSError):
                target.sendall(part)
    if close_both:
        for one in (target, source):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
