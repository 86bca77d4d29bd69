from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxserve.config.data_parallel import require_single_process
from jaxserve.config.explain import as_rows
from jaxserve.config.kv_events import KvEventsConfig, at_rank
from jaxserve.config.load import GivenSetting, load_config
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError


def read(value: object) -> KvEventsConfig | None:
    return load_config([GivenSetting("kv_events_config", value, "flag", "--kv-events-config")]).engine.kv_events_config


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"enable_kv_cache_events": True}, KvEventsConfig()),
        ({"publisher": "zmq", "topic": "kv-events"}, KvEventsConfig(topic="kv-events")),
        ({"enable_kv_cache_events": True, "publisher": "zmq", "hwm": 0}, KvEventsConfig(hwm=0)),
        ({"enable_kv_cache_events": True, "publisher": None, "replay_endpoint": None}, KvEventsConfig()),
        ({"enable_kv_cache_events": False, "endpoint": "tcp://*:1"}, None),
        ({"publisher": "null"}, None),
        ({}, None),
    ],
)
def test_either_key_of_vllm_or_sglang_switches_it_on(given: dict[str, Any], expected: KvEventsConfig | None) -> None:
    assert read(json.dumps(given)) == expected
    assert KvEventsConfig.read(given, "x") == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "--kv-events-config is not valid JSON: .*; write it like"),
        ("[1]", r"--kv-events-config must be a mapping, got \[1\]"),
        (
            '{"publisher": "zmq", "endpoit": "x"}',
            "--kv-events-config: endpoit is not a known key; did you mean endpoint",
        ),
        ('{"publisher": "kafka"}', "publisher must be null or zmq, got 'kafka'"),
        ('{"publisher": "zmq", "hwm": "many"}', "hwm must be a whole number, got 'many'"),
        ('{"publisher": "zmq", "hwm": true}', "hwm must be a whole number, got True"),
        ('{"publisher": "zmq", "hwm": -1}', r"hwm must be in \[0, 2147483647\], got -1"),
        ('{"publisher": "zmq", "max_queue_size": 0}', r"max_queue_size must be in \[1, 2147483647\], got 0"),
        (
            '{"enable_kv_cache_events": false, "publisher": "zmq"}',
            "events=false and publisher=zmq contradict each other",
        ),
        (
            '{"enable_kv_cache_events": true, "publisher": "null"}',
            "events=true and publisher=null contradict each other",
        ),
        ('{"topic": "kv"}', "topic: nothing is published without publisher=zmq; add it"),
        *(
            (json.dumps({"publisher": "zmq", "endpoint": endpoint}), f"endpoint must be like .*; got '{endpoint}'")
            for endpoint in (
                "inproc://cache",
                "tcp://5557",
                "udp://host:5557",
                "tcp://host:port",
                "tcp://host:70000",
                "",
            )
        ),
        ('{"publisher": "zmq", "replay_endpoint": "5558"}', "replay_endpoint must be like .*; got '5558'"),
        ('{"publisher": "zmq", "replay_endpoint": "tcp://*:5557"}', "collide with 1 ranks"),
    ],
)
def test_a_mistake_is_an_error_that_names_it(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(given)


def test_it_is_a_mapping_in_yaml_and_in_explanations(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("kv_events_config:\n  publisher: zmq\n  endpoint: ipc:///tmp/events\n")
    loaded = load_config([], path)
    assert loaded.engine.kv_events_config == KvEventsConfig(endpoint="ipc:///tmp/events")
    [row] = [row for row in as_rows(loaded) if row["key"] == "kv_events_config"]
    assert read(json.dumps(row["value"])) == loaded.engine.kv_events_config
    sent = msgspec.msgpack.encode(loaded.engine)
    assert msgspec.msgpack.decode(sent, type=EngineConfig) == loaded.engine


def test_each_rank_needs_ports_of_its_own() -> None:
    def check(dp_size: int, **settings: Any) -> None:
        EngineConfig(dp_size=dp_size, kv_events_config=KvEventsConfig(**settings))

    check(1, replay_endpoint="tcp://*:5558")
    check(4, replay_endpoint="tcp://*:5561")
    check(4, endpoint="tcp://router:5557", replay_endpoint="tcp://*:5557")
    check(4, endpoint="tcp://*:0", replay_endpoint="tcp://*:0")
    with pytest.raises(ConfigError, match=r"collide with 2 ranks, .* set them at least 2 apart"):
        check(2, replay_endpoint="tcp://*:5558")
    with pytest.raises(ConfigError, match="need ports up to 65536; the last one is 65535"):
        check(2, endpoint="tcp://*:65535")
    endpoints = ("tcp://*:5557", "tcp://[::1]:80", "tcp://*:0", "ipc:///a:0")
    assert [at_rank(endpoint, 2) for endpoint in endpoints] == ["tcp://*:5559", "tcp://[::1]:82", "tcp://*:0",
                                                                "ipc:///a:0_dp2"]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "binds"),
    [
        ({}, True),
        ({"endpoint": "tcp://0.0.0.0:1"}, True),
        ({"endpoint": "tcp://[::]:1"}, True),
        ({"endpoint": "ipc:///tmp/a"}, True),
        ({"endpoint": "tcp://router:1"}, False),
        ({"endpoint": "tcp://127.0.0.1:1", "bind": True}, True),
    ],
)
def test_a_socket_at_a_certain_host_connects_to_it(settings: dict[str, Any], binds: bool) -> None:
    assert KvEventsConfig(**settings).binds is binds


def test_it_needs_the_prefix_cache_and_a_server() -> None:
    with pytest.raises(ConfigError, match=r"kv_events_config publishes .* disable_radix_cache disables; keep one"):
        EngineConfig(disable_radix_cache=True, kv_events_config=KvEventsConfig())
    with pytest.raises(ConfigError, match="kv_events_config: LLM publishes no events"):
        require_single_process(EngineConfig(kv_events_config=KvEventsConfig()), "LLM")


def test_routers_are_told_only_a_port_that_is_known_and_bound() -> None:
    told = KvEventsConfig(endpoint="tcp://10.0.0.1:9", bind=True).for_routers(16, 2)
    assert told is not None
    assert (told["endpoint_host"], told["endpoint_port_base"], told["dp_size"]) == ("10.0.0.1", 9, 2)
    for endpoint in ("tcp://*:0", "ipc:///tmp/a", "tcp://router:5557"):
        assert KvEventsConfig(endpoint=endpoint).for_routers(16, 2) is None
