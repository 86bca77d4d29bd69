from __future__ import annotations

import select
import socket
import threading

from jaxserve.engine.multihost.coordinator_proxy import end_tunnel, free_port, open_tunnel


def _tunnel() -> tuple[socket.socket, socket.socket, socket.socket]:
    """A coordinator's listener, a connection to it through a tunnel, and the middle of the tunnel."""
    coordinator = socket.create_server(("127.0.0.1", free_port()))
    hall = socket.create_server(("127.0.0.1", 0))
    middle = []

    def greet() -> None:
        guest, _ = hall.accept()
        end_tunnel(guest, coordinator.getsockname()[1])

    def connect() -> socket.socket:
        middle.append(socket.create_connection(hall.getsockname()))
        return middle[0]

    threading.Thread(target=greet, daemon=True).start()
    client = socket.create_connection(("127.0.0.1", open_tunnel(connect)))
    client.sendall(b"hello")
    server, _ = coordinator.accept()
    coordinator.close()
    assert server.recv(5) == b"hello"
    server.sendall(b"welcome")
    assert client.recv(7) == b"welcome"
    return client, server, middle[0]


def test_both_ways_and_a_client_that_leaves_is_told() -> None:
    client, server, _ = _tunnel()
    with client, server:
        client.shutdown(socket.SHUT_RDWR)
        assert server.recv(1) == b""


def test_a_coordinator_that_is_gone_is_not_told() -> None:
    client, server, middle = _tunnel()
    with client:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        middle.shutdown(socket.SHUT_RDWR)
        client.sendall(b"nobody reads it")
        assert select.select([client], [], [], 0.5)[0] == []
