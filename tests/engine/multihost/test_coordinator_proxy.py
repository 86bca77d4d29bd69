from __future__ import annotations

import select
import socket
import threading

from jaxserve import host
from jaxserve.engine.multihost.coordinator_proxy import forward_to_coordinator, start_proxy


def _tunnel() -> tuple[socket.socket, socket.socket, socket.socket]:
    """Return both ends of a connection through a tunnel to a coordinator, and the socket between the two nodes."""
    coordinator = socket.create_server(("127.0.0.1", host.free_port()))
    rendezvous = socket.create_server(("127.0.0.1", 0))
    middle = []

    def accept() -> None:
        connected, _ = rendezvous.accept()
        forward_to_coordinator(connected, coordinator.getsockname()[1])

    def connect() -> socket.socket:
        middle.append(socket.create_connection(rendezvous.getsockname()))
        return middle[0]

    threading.Thread(target=accept, daemon=True).start()
    client = socket.create_connection(("127.0.0.1", start_proxy(connect)))
    client.sendall(b"hello")
    server, _ = coordinator.accept()
    coordinator.close()
    assert server.recv(5) == b"hello"
    server.sendall(b"welcome")
    assert client.recv(7) == b"welcome"
    return client, server, middle[0]


def test_bytes_pass_both_ways_and_the_end_of_the_client_too() -> None:
    client, server, _ = _tunnel()
    with client, server:
        client.shutdown(socket.SHUT_RDWR)
        assert server.recv(1) == b""


def test_the_client_stays_connected_when_the_coordinator_is_gone() -> None:
    client, server, middle = _tunnel()
    with client:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        middle.shutdown(socket.SHUT_RDWR)
        client.sendall(b"unread")
        assert select.select([client], [], [], 0.5)[0] == []
