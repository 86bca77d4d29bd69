from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from jaxserve.engine.multihost import peer_connection
from jaxserve.engine.multihost.peer_connection import MessageKind, PeerConnection
from jaxserve.errors import EngineDeadError

TIMEOUT = 60


class End:
    """A connection, and what its callbacks received."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.exits: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.peer = PeerConnection(connected, self.lost.put, self.exits.put)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        if self.peer._thread.ident is not None:
            self.peer._thread.join(TIMEOUT)
        self.socket.close()


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = End(socket.create_connection(listener.getsockname()))
        other = End(listener.accept()[0])
    yield one, other
    other.close()
    one.close()


def test_messages_arrive_in_order_and_whole(ends: tuple[End, End]) -> None:
    one, other = ends
    bodies = [os.urandom(size) for size in (0, 1, 10_000, 5_000_000, 3)]
    one.peer.start()
    other.peer.start()
    for body in bodies:
        one.peer.send(MessageKind.COMMAND, body)
    assert [other.peer.receive() for _ in bodies] == [(MessageKind.COMMAND, body) for body in bodies]


def test_send_never_waits_for_the_peer(ends: tuple[End, End]) -> None:
    one, other = ends
    one.peer.start()
    body = bytes(1_000_000)
    for _ in range(50):  # far more than the sockets buffer, and the peer doesn't read
        one.peer.send(MessageKind.COMMAND, body)
    other.peer.start()
    assert all(other.peer.receive() == (MessageKind.COMMAND, body) for _ in range(50))


def test_an_exit_is_reported_at_once_without_a_receive(ends: tuple[End, End]) -> None:
    one, other = ends
    other.peer.start()
    one.peer.send(MessageKind.EXIT, b"stopped")
    assert other.exits.get(timeout=TIMEOUT) == b"stopped"


def test_a_closed_connection_is_reported(ends: tuple[End, End]) -> None:
    one, other = ends
    one.peer.start()
    other.socket.close()
    assert one.lost.get(timeout=TIMEOUT) == "its connection has closed"
    with pytest.raises(EngineDeadError):
        one.peer.receive()
    one.peer.send(MessageKind.COMMAND, b"dropped")


def test_silence_is_reported_and_heartbeats_prevent_it(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connection, "HEARTBEAT_INTERVAL", 0.05)
    one, other = ends
    one.peer.silence_timeout = other.peer.silence_timeout = 1.0
    one.peer.start()
    other.peer.start()
    with pytest.raises(queue.Empty):
        one.lost.get(timeout=2.0)
    # From now on the peer sends nothing and its socket stays open, as if the network had been cut.
    monkeypatch.setattr(other.peer, "send", lambda *message: None)
    assert "nothing was heard from it" in one.lost.get(timeout=TIMEOUT)


def test_bytes_that_are_no_message_end_the_connection(ends: tuple[End, End]) -> None:
    one, other = ends
    one.peer.start()
    other.socket.setblocking(True)
    other.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert one.lost.get(timeout=TIMEOUT) == "it sent a message of the unknown kind 71"


def test_many_threads_may_send(ends: tuple[End, End]) -> None:
    one, other = ends
    one.peer.start()
    other.peer.start()
    threads = [
        threading.Thread(target=lambda i=i: [one.peer.send(MessageKind.VALUE, bytes([i]) * 50_000) for _ in range(20)])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    bodies = [other.peer.receive()[1] for _ in range(80)]
    assert sorted(body[0] for body in bodies) == sorted(list(range(4)) * 20)
    assert all(len(body) == 50_000 and len(set(body)) == 1 for body in bodies)
