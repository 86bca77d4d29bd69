from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from jaxserve.config.kv_events import KvEventsConfig
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.kv_cache.cache_events import PagesRemoved
from jaxserve.engine.process.cache_publisher import END_OF_REPLAY, CachePublisher, EventBatch, open_publishers
from jaxserve.errors import ConfigError


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)


@contextmanager
def _socket(kind: int, address: str, topic: str = "") -> Iterator[zmq.Socket[bytes]]:
    """A socket of a client, which waits for a minute at most; a subscriber is known to the publisher."""
    context = zmq.Context()
    one: zmq.Socket[bytes] = context.socket(kind)
    one.rcvtimeo = 60_000
    if kind == zmq.SUB:
        one.subscribe(topic)
    one.connect(address)
    yield one
    context.destroy(linger=0)


def _publisher(folder: Path, rank: int = 0, **settings: Any) -> CachePublisher:
    given = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay", "topic": "kv"}
    return CachePublisher(KvEventsConfig(**given | settings), rank)


def _event(number: int) -> list[Any]:
    return [PagesRemoved([number], "GPU")]


def _request(client: zmq.Socket[bytes], first: int) -> list[tuple[bytes, int, bytes]]:
    """Return the batches from a number on, as (topic, number, payload)."""
    client.send_multipart([b"", first.to_bytes(8, "big")])
    found = []
    while True:
        empty, topic, number, payload = client.recv_multipart()
        assert empty == b""
        if number == END_OF_REPLAY:
            assert (topic, payload) == (b"", b"")
            return found
        found.append((topic, int.from_bytes(number, "big"), payload))


def test_batches_are_published_under_the_topic_with_a_number_and_can_be_asked_for_again(folder: Path) -> None:
    publisher = _publisher(folder, buffer_steps=3)
    with (
        _socket(zmq.SUB, publisher.endpoints[0], "k") as subscriber,
        _socket(zmq.DEALER, publisher.endpoints[1]) as client,
    ):
        number = 0
        while not subscriber.poll(20):  # until the publisher knows the subscriber
            publisher.publish(_event(number))
            number += 1
        publisher.publish(_event(number))
        seen = []
        while not seen or seen[-1][1] < number:
            topic, raw, payload = subscriber.recv_multipart()
            seen.append((topic, int.from_bytes(raw, "big"), payload))
        assert [one for _, one, _ in seen] == list(range(seen[0][1], number + 1))
        for topic, one, payload in seen:
            batch = msgspec.msgpack.decode(payload, type=EventBatch)
            assert (topic, batch.events, batch.data_parallel_rank) == (b"kv", _event(one), 0)
        for extra in range(4):
            publisher.publish(_event(number + 1 + extra))
        last = number + 4
        while subscriber.recv_multipart()[1] != last.to_bytes(8, "big"):
            pass
        kept = _request(client, 0)
        assert [one for _, one, _ in kept] == [last - 2, last - 1, last], "as many as are kept"
        assert {topic for topic, *_ in kept} == {b"kv"}
        assert _request(client, last) == kept[-1:]
        assert _request(client, last + 1) == []
        client.send_multipart([b"", b"abc"])  # nobody answers, and the next one is answered
        assert _request(client, last) == kept[-1:]
    publisher.close()


def test_a_full_queue_drops_batches_whose_numbers_a_subscriber_misses(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = _publisher(folder, max_queue_size=2)
    free, send = threading.Event(), publisher._send_waiting

    def send_later() -> None:
        free.wait()
        send()

    monkeypatch.setattr(publisher, "_send_waiting", send_later)
    with caplog.at_level(logging.WARNING, "jaxserve.engine"), _socket(zmq.DEALER, publisher.endpoints[1]) as client:
        for number in range(5):
            publisher.publish(_event(number))
        assert publisher.num_dropped == 3
        assert len(caplog.records) == 1
        assert "max_queue_size" in caplog.text
        free.set()
        while len(_request(client, 0)) < 2:
            pass
        publisher.publish(_event(5))
        while len(found := _request(client, 0)) < 3:
            pass
        assert [number for _, number, _ in found] == [0, 1, 5]
        publisher.close()
        assert "3 batches of rank 0 were dropped" in caplog.text


def test_what_waits_is_published_before_the_end(folder: Path) -> None:
    context = zmq.Context()
    subscriber: zmq.Socket[bytes] = context.socket(zmq.SUB)
    subscriber.subscribe("")
    subscriber.rcvtimeo = 60_000
    subscriber.bind(f"ipc://{folder}/central")
    publisher = _publisher(folder, endpoint=f"ipc://{folder}/central", bind=False, replay_endpoint=None)
    while not subscriber.poll(20):  # until the publisher knows the subscriber
        publisher.publish(_event(0))
    for number in range(1, 100):
        publisher.publish(_event(number))
    publisher.close()
    last = None
    while last != _event(99):
        last = msgspec.msgpack.decode(subscriber.recv_multipart()[2], type=EventBatch).events
    context.destroy(linger=0)


def test_each_rank_has_sockets_of_its_own(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = KvEventsConfig(endpoint="tcp://*:0", replay_endpoint=f"ipc://{folder}/replay")
    with caplog.at_level(logging.INFO, "jaxserve.engine"):
        with open_publishers(EngineConfig(dp_size=3, dp_mode="mesh", kv_events_config=config), 0) as publishers:
            assert [publisher._rank for publisher in publishers] == [0, 1, 2]
            assert len({publisher.endpoints[0] for publisher in publishers}) == 3
            assert publishers[2].endpoints[1] == f"ipc://{folder}/replay_dp2"
        assert caplog.text.count("KV events of rank") == 3
    with open_publishers(EngineConfig(dp_size=3, dp_mode="replicas", kv_events_config=config), 2) as publishers:
        assert [publisher._rank for publisher in publishers] == [2]
    with open_publishers(EngineConfig(), 0) as publishers:
        assert publishers == ()


def test_a_port_in_use_is_an_error_that_names_it(folder: Path) -> None:
    first = _publisher(folder, endpoint="tcp://127.0.0.1:0", bind=True)
    taken = first.endpoints[0]
    with pytest.raises(ConfigError, match=f"endpoint {taken} can't be opened: Address already in use"):
        _publisher(folder, endpoint=taken, bind=True, replay_endpoint=None)
    with pytest.raises(ConfigError, match=f"replay_endpoint {taken} can't be opened"):
        _publisher(folder, endpoint="tcp://*:0", replay_endpoint=taken)
    first.close()
    _publisher(folder, endpoint=taken, bind=True, replay_endpoint=None).close()
