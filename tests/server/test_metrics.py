"""Each metric against a scripted run whose truth is known."""

from __future__ import annotations

import asyncio
import re

import msgspec
import pytest

from jaxserve.api_types import EngineStats, FinishReason
from jaxserve.observability import metrics as module
from jaxserve.observability.metrics import Metrics
from tests.server.conftest import Served, over_asgi


def samples(text: str) -> dict[str, float]:
    """Sample name with its labels but the model's, to value."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, value = line.rsplit(" ", 1)
        assert 'model_name="tiny"' in name
        found[re.sub(r'model_name="tiny",?', "", name).replace("{}", "").replace(",}", "}")] = float(value)
    return found


async def scrape(served: Served) -> dict[str, float]:
    response = await served.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples(response.text)


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_latencies(clock: Clock):
    metrics = Metrics("tiny", lambda: None)
    sequence = metrics.clock(arrival=99.5)
    sequence.tokens(0)
    sequence.tokens(1)
    clock.now += 0.1875
    sequence.tokens(1)
    clock.now += 0.75
    sequence.tokens(3)
    clock.now += 0.4
    sequence.end(FinishReason.STOP)
    sequence.end(FinishReason.ABORT)
    found = samples(metrics.render().decode())
    prefix = "jaxserve:"
    assert found[prefix + "time_to_first_token_seconds_count"] == 1
    assert found[prefix + "time_to_first_token_seconds_sum"] == pytest.approx(0.5)
    assert found[prefix + "inter_token_latency_seconds_count"] == 4
    assert found[prefix + "inter_token_latency_seconds_sum"] == pytest.approx(0.9375)
    assert found[prefix + 'inter_token_latency_seconds_bucket{le="0.2"}'] == 1
    assert found[prefix + 'inter_token_latency_seconds_bucket{le="0.3"}'] == 4
    assert found[prefix + "e2e_request_latency_seconds_count"] == 1
    assert found[prefix + "e2e_request_latency_seconds_sum"] == pytest.approx(1.8375)
    assert found[prefix + 'request_success_total{finished_reason="stop"}'] == 1
    assert found[prefix + 'request_success_total{finished_reason="abort"}'] == 0


def test_a_first_event_of_several_tokens(clock: Clock):
    metrics = Metrics("tiny", lambda: None)
    metrics.clock(arrival=99.0).tokens(3)
    found = samples(metrics.render().decode())
    assert found["jaxserve:time_to_first_token_seconds_sum"] == pytest.approx(1.0)
    assert found["jaxserve:inter_token_latency_seconds_count"] == 2


def test_the_engines_reading():
    stats = EngineStats(
        num_running=3,
        num_waiting=4,
        token_usage=0.25,
        prompt_tokens=1000,
        generation_tokens=200,
        num_preemptions=5,
        compiles_after_ready=1,
    )
    found = samples(Metrics("tiny", lambda: stats).render().decode())
    truth = {
        "num_requests_running": 3,
        "num_requests_waiting": 4,
        "token_usage": 0.25,
        "prompt_tokens_total": 1000,
        "generation_tokens_total": 200,
        "num_preemptions_total": 5,
        "compiles_after_ready_total": 1,
    }
    assert {name: found[f"jaxserve:{name}"] for name in truth} == truth


def test_two_servers_in_a_process_do_not_meet():
    one, other = Metrics("tiny", lambda: None), Metrics("tiny", lambda: None)
    one.clock(0.0).end(FinishReason.STOP)
    name = 'jaxserve:request_success_total{finished_reason="stop"}'
    assert samples(one.render().decode())[name] == 1
    assert samples(other.render().decode())[name] == 0


async def test_a_scripted_run():
    async with over_asgi(
        engine={"refuse": lambda request: "broken" if request.sampling.seed == 13 else None}
    ) as served:
        http = served.http
        await http.post("/v1/completions", json={"prompt": ["abc", "de"], "n": 2, "max_tokens": 5})
        await http.post("/v1/completions", json={"prompt": "abcd", "max_tokens": 20, "stop": "y", "stream": True})
        await http.post("/v1/completions", json={"prompt": "abcd", "seed": 13})
        await http.post("/v1/completions", json={"prompt": "abcd", "max_tokens": -1})
        served.engine.hold()
        held = asyncio.ensure_future(http.post("/v1/completions", json={"prompt": "xy", "max_tokens": 9, "n": 3}))
        await served.engine.wait_for(lambda: len(served.engine.submitted) == 9)
        while_running = await scrape(served)
        await served.engine.step()
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        await served.serving.idle.wait()
        found = await scrape(served)
    assert while_running["jaxserve:num_requests_running"] == 3
    assert found["jaxserve:num_requests_running"] == 0
    # 4 sequences of 5 tokens, "de…y" to the stop, 3 of one token each before they were left
    text = "".join(chr(ord("a") + (ord("d") + step) % 26) for step in range(26))
    until_stop = text.index("y") + 1
    assert found["jaxserve:prompt_tokens_total"] == 2 * 3 + 2 * 2 + 4 + 3 * 2
    assert found["jaxserve:generation_tokens_total"] >= 20 + until_stop + 3
    assert found["jaxserve:time_to_first_token_seconds_count"] == 4 + 1 + 3
    assert found["jaxserve:inter_token_latency_seconds_count"] == 4 * 4 + until_stop - 1
    assert found["jaxserve:e2e_request_latency_seconds_count"] == 4 + 1 + 1 + 3
    reasons = {"length": 4, "stop": 1, "error": 1, "abort": 3}
    assert {r: found[f'jaxserve:request_success_total{{finished_reason="{r}"}}'] for r in reasons} == reasons


async def test_a_scrape_asks_the_engine_for_the_state_of_now(served: Served):
    served.engine.stats = msgspec.structs.replace(served.engine.stats, num_running=7)
    assert (await scrape(served))["jaxserve:num_requests_running"] == 0
