from __future__ import annotations

import logging
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.engine.multihost import handshake, rendezvous
from jaxserve.engine.multihost.rendezvous import Hall, carry, come
from jaxserve.errors import ConfigError


def config(rank: int = 0, *, nnodes: int = 2, port: int, timeout: float = 60.0, **more: Any) -> EngineConfig:
    return EngineConfig(
        tp_size=nnodes,
        nnodes=nnodes,
        node_rank=rank,
        dist_init_addr=f"127.0.0.1:{port}",
        dist_timeout=timeout,
        **more,
    )


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        found: int = free.getsockname()[1]
        return found


def _has_ended(visitor: socket.socket) -> bool:
    visitor.settimeout(60)
    try:
        return visitor.recv(100) == b""
    except ConnectionResetError:  # it hadn't read all that was sent
        return True


def _leave(*guests: Future[Any]) -> None:
    for guest in guests:
        guest.result(60)[0].close()


def _in_thread(call: Any, *arguments: Any) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    done: Future[Any] = pool.submit(call, *arguments)
    pool.shutdown(wait=False)
    return done


def test_three_find_each_other_whoever_comes_first(port: int) -> None:
    early = _in_thread(come, config(2, nnodes=3, port=port))
    hall = Hall(config(nnodes=3, port=port))
    late = _in_thread(come, config(1, nnodes=3, port=port))
    seats = hall.wait()
    for number, guest in enumerate((late, early), 1):
        connected, _ = guest.result(60)
        connected.sendall(b"%d" % number)
        assert seats[number - 1].recv(1) == b"%d" % number
    _leave(early, late)


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ({"page_size": 32}, "page_size is 32 there and 16 on node rank 0"),
        ({"model": "another"}, "model is 'another' there"),
        ({"nnodes": 3}, "nnodes is 3 there and 2"),
    ],
)
def test_who_was_started_otherwise_is_sent_away_and_both_say_why(theirs: dict[str, Any], says: str, port: int) -> None:
    hall = Hall(config(port=port, timeout=1.0))
    waiting = _in_thread(hall.wait)
    with pytest.raises(ConfigError, match=says):
        come(config(1, port=port, **theirs))
    with pytest.raises(ConfigError, match=rf"node rank 1 of nnodes=2 did not come.*{says}"):
        waiting.result(60)


def test_another_version_is_sent_away(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hall = Hall(config(port=port))
    monkeypatch.setattr(handshake.jaxserve, "__version__", "0.0.0")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"jaxserve is '0\.0\.0' there"):
        come(config(1, port=port))
    assert not hall._joined


def test_a_rank_that_is_taken_and_one_that_comes_too_late(port: int) -> None:
    hall = Hall(config(nnodes=3, port=port))
    first = _in_thread(come, config(1, nnodes=3, port=port))
    with hall._changed:
        assert hall._changed.wait_for(lambda: 1 in hall._joined, 60)
    with pytest.raises(ConfigError, match="node_rank=1 is here already"):
        come(config(1, nnodes=3, port=port))
    last = _in_thread(come, config(2, nnodes=3, port=port))
    hall.wait()
    _leave(first, last)
    with pytest.raises(ConfigError, match="comes too late"):
        come(config(2, nnodes=3, port=port))


def test_a_follower_that_died_while_it_waited_may_come_again(port: int) -> None:
    hall = Hall(config(nnodes=3, port=port))
    with rendezvous._connect(f"127.0.0.1:{port}", 60) as first:
        handshake.send(first, handshake.Join(1, handshake.facts_of(config(1, nnodes=3, port=port))))
        assert handshake.receive(first, handshake.Answer) == handshake.Noted()
    again = [_in_thread(come, config(rank, nnodes=3, port=port)) for rank in (1, 2)]
    hall.wait()
    _leave(*again)


def test_a_visitor_does_no_harm(port: int, caplog: pytest.LogCaptureFixture) -> None:
    hall = Hall(config(port=port))
    with caplog.at_level(logging.WARNING), socket.create_connection(("127.0.0.1", port)) as visitor:
        visitor.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        assert _has_ended(visitor)
    assert "is no process of this service" in caplog.text
    guest = _in_thread(come, config(1, port=port))
    hall.wait()
    _leave(guest)


def test_a_message_that_can_not_be_read_does_no_harm(port: int) -> None:
    hall = Hall(config(port=port))
    with socket.create_connection(("127.0.0.1", port)) as visitor:
        body = msgspec.msgpack.encode({"type": "Nobody"})
        visitor.sendall(handshake._MAGIC + handshake._SIZE.pack(len(body)) + body)
        assert _has_ended(visitor)
    assert not hall._joined


@pytest.mark.parametrize("secret", ["", "guessed", "é"])
def test_nobody_is_carried_to_the_coordinator_without_the_secret(secret: str, port: int) -> None:
    Hall(config(port=port))
    with carry(f"127.0.0.1:{port}", secret) as tunnel:
        answer = handshake.receive(tunnel, handshake.Answer)
    assert answer == handshake.Refused("its secret is not that of this service")


def test_a_leader_that_is_missing_is_said_within_the_time(port: int) -> None:
    with pytest.raises(ConfigError, match=r"did not let this process in within dist_timeout=0\.5 s .*refused"):
        come(config(1, port=port, timeout=0.5))


def test_somebody_else_at_the_address_is_said(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as listener:

        def answer() -> None:
            guest, _ = listener.accept()
            with guest:
                guest.recv(1000)
                guest.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ConfigError, match="who answers there is no `jaxserve serve`"):
            come(config(1, port=port))


def test_an_address_of_another_machine_is_refused_to_node_rank_0(port: int) -> None:
    elsewhere = msgspec.structs.replace(config(port=port), dist_init_addr=f"192.0.2.1:{port}")
    with pytest.raises(ConfigError, match="can't listen there"):
        Hall(elsewhere)


def test_when_one_is_missing_those_that_came_are_told(port: int) -> None:
    hall = Hall(config(nnodes=3, port=port, timeout=2.0))
    guest = _in_thread(come, config(1, nnodes=3, port=port))
    with pytest.raises(ConfigError, match="node rank 2 of nnodes=3 did not come"):
        hall.wait()
    with pytest.raises(ConfigError, match=r"node rank 0 at .* says: node rank 2 of nnodes=3 did not come"):
        guest.result(60)
