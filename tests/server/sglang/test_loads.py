"""`/v1/loads` and `/get_load`: each number is of the last reading of its engine process, and no engine is asked."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from jaxserve.api_types import EngineStats, ReplicaStats
from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.observability import metrics
from jaxserve.server.app import make_app
from jaxserve.server.server_state import ServerState
from tests.server.admin.test_metrics import Clock
from tests.server.conftest import ServerUnderTest
from tests.server.fake_engine import FakeEngine

# Of 32 pages of 16 tokens, 12 are in use.
BUSY = EngineStats(
    num_running=4,
    num_waiting=3,
    num_queued_tokens=70,
    num_pages=32,
    num_free_pages=12,
    num_evictable_pages=8,
    token_usage=0.375,
    cache_query_tokens=200,
    cache_hit_tokens=50,
)
IDLE = EngineStats(num_pages=32, num_free_pages=32)


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[EngineStats]:
    """The last readings of two replicas, which a test may replace."""
    found = [BUSY, IDLE]
    of_each = property(lambda _: tuple(ReplicaStats(number, stats) for number, stats in enumerate(found)))
    monkeypatch.setattr(FakeEngine, "replicas", of_each)
    return found


async def ask(server: ServerUnderTest, path: str) -> Any:
    answer = await server.http.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_each_replica_is_a_load(
    server: ServerUnderTest, readings: list[EngineStats], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    server.state.metrics.tick()
    clock.now += 2.0
    readings[0] = msgspec.structs.replace(BUSY, generation_tokens=30)
    server.state.metrics.tick()
    monkeypatch.delattr(FakeEngine, "refresh_stats")  # which no gateway may cause
    found = await ask(server, "/v1/loads")
    busy = {
        "dp_rank": 0,
        "num_running_reqs": 4,
        "num_waiting_reqs": 3,
        "num_total_reqs": 7,
        "num_used_tokens": 192,
        "num_total_tokens": 262,
        "max_total_num_tokens": 512,
        "max_running_requests": 16,
        "token_usage": 0.375,
        "gen_throughput": 15.0,
        "cache_hit_rate": 0.25,
        "utilization": 0.375,
        "queues": {"waiting": 3},
    }
    assert found["loads"][0] == busy
    idle = {name: found["loads"][1][name] for name in busy}
    assert idle == dict.fromkeys(busy, 0) | {
        "dp_rank": 1,
        "max_total_num_tokens": 512,
        "max_running_requests": 16,
        "queues": {"waiting": 0},
    }
    assert found["aggregate"] == {
        "total_running_reqs": 4,
        "total_waiting_reqs": 3,
        "total_reqs": 7,
        "avg_token_usage": 0.1875,
        "avg_throughput": 7.5,
        "avg_utilization": 0.1875,
    }
    assert (found["accelerator"], found["num_accelerators"], found["dp_rank_count"]) == ("fake", 1, 2)
    assert await ask(server, "/get_load") == [
        {"dp_rank": 0, "num_reqs": 7, "num_waiting_reqs": 3, "num_tokens": 262},
        {"dp_rank": 1, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0},
    ]


@pytest.mark.parametrize(("mode", "devices"), [("auto", 3), ("replicas", 3), ("mesh", 6)])
async def test_a_load_has_the_devices_of_its_process(server: ServerUnderTest, mode: str, devices: int) -> None:
    server.state.engine_config = EngineConfig(dp_size=2, tp_size=3, dp_mode=mode)
    assert (await ask(server, "/v1/loads"))["num_accelerators"] == devices
    server.state.engine_config = EngineConfig(dp_size=2, tp_size=3, pp_size=2, dp_mode=mode)
    assert (await ask(server, "/v1/loads"))["num_accelerators"] == 2 * devices


async def test_a_query_chooses_ranks_and_sections(server: ServerUnderTest, readings: list[EngineStats]) -> None:
    readings[1] = msgspec.structs.replace(IDLE, num_drafts=10, draft_tokens=28, accepted_tokens=14)
    one = await ask(server, "/loads?model=tiny&dp_rank=1&include=core,spec,disagg,lora,memory")
    [load] = one["loads"]
    assert load["dp_rank"] == 1
    assert load["speculative"] == {"accept_length": 2.4, "accept_rate": 0.5}
    assert "queues" not in load
    assert one["aggregate"]["total_reqs"] == 0
    [load] = (await ask(server, "/v1/loads?dp_rank=1&include=core&format=json"))["loads"]
    assert not load.keys() & {"queues", "speculative"}


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("dp_rank=2", 400, "dp_rank"),
        ("dp_rank=-1", 400, "dp_rank"),
        ("dp_rank=", 400, "dp_rank"),
        ("include=core,all_of_it", 400, "include"),
        ("include=", 400, "include"),
        ("format=prometheus", 400, "format"),
        ("rank=1", 400, "rank"),
        ("model=other", 404, "model"),
    ],
)
async def test_a_query_that_cannot_be_answered(
    server: ServerUnderTest, readings: list[EngineStats], query: str, status: int, param: str
) -> None:
    for path in ("/loads", "/v1/loads"):
        answer = await server.http.get(f"{path}?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_an_engine_that_has_made_no_step_has_its_size(server: ServerUnderTest) -> None:
    server.engine.stats = EngineStats()
    [load] = (await ask(server, "/v1/loads"))["loads"]
    assert (load["max_total_num_tokens"], load["num_used_tokens"]) == (1024, 0)


async def test_there_are_no_loads_while_the_model_is_loading() -> None:
    transport = httpx.ASGITransport(make_app(ServerState(ServerConfig(), EngineConfig())))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for path in ("/v1/loads", "/loads", "/get_load"):
            answer = await http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert (await http.get("/load")).json() == {"server_load": 0}


async def test_open_requests_are_counted(server: ServerUnderTest) -> None:
    server.engine.hold()
    asked = [asyncio.ensure_future(server.http.post("/generate", json={"text": "a"})) for _ in range(3)]
    await server.engine.wait_for(lambda: len(server.engine.submitted) == 3)
    assert await ask(server, "/load") == {"server_load": 3}
    server.engine.release()
    await asyncio.gather(*asked)
    assert await ask(server, "/load") == {"server_load": 0}
