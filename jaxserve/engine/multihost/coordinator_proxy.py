"""Carries a follower's connections to the jax coordinator, which listens on process 0's loopback, through the address
where the processes meet: one port for all, and the coordinator is open to none but them.

A tunnel that is cut doesn't tell: jax ends a process at once when its coordinator is gone, before anything could be
said about it. Who is gone is told by the links.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

_CHUNK = 1 << 16
_COORDINATOR_STARTS_WITHIN = 60.0
_RETRY = 0.1


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def open_tunnel(connect: Callable[[], socket.socket]) -> int:
    """A port of this process' loopback, each connection to which is carried on through one that `connect` makes."""
    listener = socket.create_server(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]

    def accept() -> None:
        while True:
            inner, _ = listener.accept()
            try:
                outer = connect()
            except OSError:
                continue  # silent: `inner` stays open, see above
            join(inner, outer)

    threading.Thread(target=accept, name="jaxserve-tunnel", daemon=True).start()
    return port


def end_tunnel(outer: socket.socket, port: int) -> None:
    """Carry a follower's connection on to the coordinator here, which may not listen yet."""
    deadline = time.monotonic() + _COORDINATOR_STARTS_WITHIN
    while True:
        try:
            inner = socket.create_connection(("127.0.0.1", port))
        except OSError:
            if time.monotonic() > deadline:
                outer.close()
                return
            time.sleep(_RETRY)
        else:
            join(outer, inner)
            return


def join(kept: socket.socket, other: socket.socket) -> None:
    """Copy both ways; `kept` stays open when `other` ends, but not the other way round."""
    for one in (kept, other):
        one.settimeout(None)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=_copy, args=(kept, other, True), name="jaxserve-tunnel", daemon=True).start()
    threading.Thread(target=_copy, args=(other, kept, False), name="jaxserve-tunnel", daemon=True).start()


def _copy(source: socket.socket, target: socket.socket, tell: bool) -> None:
    """Until `source` ends; with `tell`, `target` ends then too. What `target` doesn't take is dropped."""
    with contextlib.suppress(OSError):
        while part := source.recv(_CHUNK):
            with contextlib.suppress(OSError):
                target.sendall(part)
    if tell:
        for one in (target, source):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
