from __future__ import annotations

import logging
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from jaxserve import host
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.multihost import handshake, rendezvous
from jaxserve.engine.multihost.rendezvous import RendezvousServer, dial, join
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
    return host.free_port()


def _has_ended(stranger: socket.socket) -> bool:
    stranger.settimeout(60)
    try:
        return stranger.recv(100) == b""
    except ConnectionResetError:  # it hadn't read all that was sent
        return True


def _close(*followers: Future[Any]) -> None:
    for follower in followers:
        follower.result(60)[0].close()


def _in_thread(call: Any, *arguments: Any) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    done: Future[Any] = pool.submit(call, *arguments)
    pool.shutdown(wait=False)
    return done


def test_three_processes_connect_in_any_order(port: int) -> None:
    early = _in_thread(join, config(2, nnodes=3, port=port))
    server = RendezvousServer(config(nnodes=3, port=port))
    late = _in_thread(join, config(1, nnodes=3, port=port))
    sockets = server.wait_for_all()
    for number, follower in enumerate((late, early), 1):
        connected, _ = follower.result(60)
        connected.sendall(b"%d" % number)
        assert sockets[number - 1].recv(1) == b"%d" % number
    _close(early, late)


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ({"page_size": 32}, "page_size is 32 there and 16 on node rank 0"),
        ({"model": "another"}, "model is 'another' there"),
        ({"nnodes": 3}, "nnodes is 3 there and 2"),
    ],
)
def test_other_settings_are_refused_and_both_sides_say_why(theirs: dict[str, Any], says: str, port: int) -> None:
    server = RendezvousServer(config(port=port, timeout=1.0))
    waiting = _in_thread(server.wait_for_all)
    with pytest.raises(ConfigError, match=says):
        join(config(1, port=port, **theirs))
    with pytest.raises(ConfigError, match=rf"node rank 1 of nnodes=2 did not join.*{says}"):
        waiting.result(60)


def test_another_version_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    server = RendezvousServer(config(port=port))
    monkeypatch.setattr(handshake.jaxserve, "__version__", "0.0.0")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"jaxserve is '0\.0\.0' there"):
        join(config(1, port=port))
    assert not server._joined


def test_a_duplicate_rank_and_a_late_one_are_refused(port: int) -> None:
    server = RendezvousServer(config(nnodes=3, port=port))
    first = _in_thread(join, config(1, nnodes=3, port=port))
    with server._changed:
        assert server._changed.wait_for(lambda: 1 in server._joined, 60)
    with pytest.raises(ConfigError, match="node_rank=1 has joined already"):
        join(config(1, nnodes=3, port=port))
    last = _in_thread(join, config(2, nnodes=3, port=port))
    server.wait_for_all()
    _close(first, last)
    with pytest.raises(ConfigError, match="came too late"):
        join(config(2, nnodes=3, port=port))


def test_a_follower_that_died_while_it_waited_may_join_again(port: int) -> None:
    server = RendezvousServer(config(nnodes=3, port=port))
    with rendezvous._connect(f"127.0.0.1:{port}", 60) as first:
        handshake.send(first, handshake.JoinRequest(1, handshake.shared_facts(config(1, nnodes=3, port=port))))
        assert handshake.receive(first, handshake.HandshakeReply) == handshake.Acknowledged()
    again = [_in_thread(join, config(rank, nnodes=3, port=port)) for rank in (1, 2)]
    server.wait_for_all()
    _close(*again)


def test_another_protocol_does_no_harm(port: int, caplog: pytest.LogCaptureFixture) -> None:
    server = RendezvousServer(config(port=port))
    with caplog.at_level(logging.WARNING), socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        assert _has_ended(stranger)
    assert "is no process of this service" in caplog.text
    follower = _in_thread(join, config(1, port=port))
    server.wait_for_all()
    _close(follower)


def test_a_message_that_can_not_be_decoded_does_no_harm(port: int) -> None:
    server = RendezvousServer(config(port=port))
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        body = msgspec.msgpack.encode({"type": "Unknown"})
        stranger.sendall(handshake._MAGIC + handshake._FRAMES.encode(body))
        assert _has_ended(stranger)
    assert not server._joined


@pytest.mark.parametrize("secret", ["", "guessed", "é"])
def test_the_coordinator_can_not_be_reached_without_the_secret(secret: str, port: int) -> None:
    RendezvousServer(config(port=port))
    with dial(f"127.0.0.1:{port}", secret) as tunnel:
        reply = handshake.receive(tunnel, handshake.HandshakeReply)
    assert reply == handshake.JoinRefused("its secret is not that of this service")


def test_a_missing_leader_is_reported_within_the_timeout(port: int) -> None:
    with pytest.raises(ConfigError, match=r"did not accept this process within dist_timeout=0\.5 s .*refused"):
        join(config(1, port=port, timeout=0.5))


def test_another_program_at_the_address_is_reported(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as listener:

        def answer() -> None:
            connected, _ = listener.accept()
            with connected:
                connected.recv(1000)
                connected.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ConfigError, match="the program that answers there is no `jaxserve serve`"):
            join(config(1, port=port))


def test_node_rank_0_can_not_listen_at_an_address_of_another_machine(port: int) -> None:
    remote = msgspec.structs.replace(config(port=port), dist_init_addr=f"192.0.2.1:{port}")
    with pytest.raises(ConfigError, match="can't listen there"):
        RendezvousServer(remote)


def test_when_one_is_missing_those_that_joined_are_told(port: int) -> None:
    server = RendezvousServer(config(nnodes=3, port=port, timeout=2.0))
    follower = _in_thread(join, config(1, nnodes=3, port=port))
    with pytest.raises(ConfigError, match="node rank 2 of nnodes=3 did not join"):
        server.wait_for_all()
    with pytest.raises(ConfigError, match=r"node rank 0 at .* says: node rank 2 of nnodes=3 did not join"):
        follower.result(60)


def test_only_settings_that_change_no_token_may_differ(port: int) -> None:
    own = {"node_rank", "dist_init_addr", "dist_timeout", "log_level", "watchdog_timeout", "decode_log_interval"}
    own |= {"program_cache_dir", "disable_program_cache", "profile_dir", "kv_events_config", "log_config_file"}
    own.add("soft_watchdog_timeout")
    own.add("hf_token")
    own |= {"device_ids", "base_gpu_id", "gpu_id_step"}
    assert set(EngineConfig.__struct_fields__) - handshake.shared_facts(config(port=port)).keys() == own
