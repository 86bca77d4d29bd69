from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from jaxserve.engine.multihost import peer_connection as links
from jaxserve.engine.multihost.peer_connection import Kind, Link
from jaxserve.errors import EngineDeadError

PATIENCE = 60


class End:
    """A link, and what its owner was told."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.farewells: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.link = Link(connected, self.lost.put, self.farewells.put)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        if self.link._thread.ident is not None:
            self.link._thread.join(PATIENCE)
        self.socket.close()


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = End(socket.create_connection(listener.getsockname()))
        other = End(listener.accept()[0])
    yield one, other
    other.close()
    one.close()


def test_frames_arrive_in_order_and_whole(ends: tuple[End, End]) -> None:
    one, other = ends
    frames = [os.urandom(size) for size in (0, 1, 10_000, 5_000_000, 3)]
    one.link.start()
    other.link.start()
    for frame in frames:
        one.link.send(Kind.COMMAND, frame)
    assert [other.link.receive() for _ in frames] == [(Kind.COMMAND, frame) for frame in frames]


def test_sending_never_waits_for_the_other(ends: tuple[End, End]) -> None:
    one, other = ends
    one.link.start()
    frame = bytes(1_000_000)
    for _ in range(50):  # far more than sockets hold, and nobody reads
        one.link.send(Kind.COMMAND, frame)
    other.link.start()
    assert all(other.link.receive() == (Kind.COMMAND, frame) for _ in range(50))


def test_a_farewell_is_told_at_once_though_nobody_receives(ends: tuple[End, End]) -> None:
    one, other = ends
    other.link.start()
    one.link.send(Kind.FAREWELL, b"so long")
    assert other.farewells.get(timeout=PATIENCE) == b"so long"


def test_a_closed_connection_is_told(ends: tuple[End, End]) -> None:
    one, other = ends
    one.link.start()
    other.socket.close()
    assert one.lost.get(timeout=PATIENCE) == "its connection has closed"
    with pytest.raises(EngineDeadError):
        one.link.receive()
    one.link.send(Kind.COMMAND, b"nobody is there")


def test_silence_is_told_and_signs_of_life_are_enough(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "BEAT", 0.05)
    one, other = ends
    one.link.silence = other.link.silence = 1.0
    one.link.start()
    other.link.start()
    with pytest.raises(queue.Empty):
        one.lost.get(timeout=2.0)
    # From now on the other says nothing, and its socket stays open: as if the network had been cut.
    monkeypatch.setattr(other.link, "send", lambda *frame: None)
    assert "nothing was heard from it" in one.lost.get(timeout=PATIENCE)


def test_what_is_no_frame_ends_the_link(ends: tuple[End, End]) -> None:
    one, other = ends
    one.link.start()
    other.socket.setblocking(True)
    other.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert one.lost.get(timeout=PATIENCE) == "what it sent is no frame"


def test_many_threads_may_send(ends: tuple[End, End]) -> None:
    one, other = ends
    one.link.start()
    other.link.start()
    threads = [
        threading.Thread(target=lambda i=i: [one.link.send(Kind.VALUE, bytes([i]) * 50_000) for _ in range(20)])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    bodies = [other.link.receive()[1] for _ in range(80)]
    assert sorted(body[0] for body in bodies) == sorted(list(range(4)) * 20)
    assert all(len(body) == 50_000 and len(set(body)) == 1 for body in bodies)
