"""Checks each metric against a scripted run with known values."""

from __future__ import annotations

import asyncio
import itertools
import re

import msgspec
import pytest

from jaxserve.api_types import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    FinishReason,
    ReplicaStats,
    SamplingParams,
    StageTimes,
    Usage,
)
from jaxserve.observability import metrics as module
from jaxserve.observability.metrics import Metrics
from tests.server.conftest import ServerUnderTest, over_asgi


def samples(text: str) -> dict[str, float]:
    """Return the value of each sample by its name and labels, without the model's label."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, value = line.rsplit(" ", 1)
        assert 'model_name="tiny"' in name
        found[re.sub(r'model_name="tiny",?', "", name).replace("{}", "").replace(",}", "}")] = float(value)
    return found


def request(prompt_tokens: int, **sampling: int) -> EngineRequest:
    return EngineRequest(request_id="r", prompt_ids=[1] * prompt_tokens, sampling=SamplingParams(**sampling))


async def scrape(server: ServerUnderTest) -> dict[str, float]:
    response = await server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples(response.text)


class Clock:
    """A clock that only tests advance."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_the_times_of_a_sequence(clock: Clock):
    metrics = Metrics("tiny", lambda: None)
    clock.now = 99.75
    sequence = metrics.clock(99.5, request(7, max_tokens=6, n=2))
    clock.now = 100.0
    sequence.record_tokens(0, 0.125, Usage(7, 0, cached_tokens=4))
    sequence.record_tokens(1)
    clock.now += 0.1875
    sequence.record_tokens(1)
    clock.now += 0.75
    sequence.record_tokens(3)
    clock.now += 0.4
    sequence.record_end(FinishReason.STOP)
    sequence.record_end(FinishReason.ABORT)
    found = samples(metrics.render().decode())
    truth = {
        "time_to_first_token_seconds": (1, 0.5),
        "inter_token_latency_seconds": (4, 0.9375),
        "time_per_output_token_seconds": (4, 0.9375),
        "request_time_per_output_token_seconds": (1, 0.9375 / 4),
        "e2e_request_latency_seconds": (1, 1.8375),
        "request_queue_time_seconds": (1, 0.125),
        "queue_time_seconds": (1, 0.125),
        "request_prefill_time_seconds": (1, 0.125),
        "request_decode_time_seconds": (1, 0.9375),
        "request_inference_time_seconds": (1, 1.0625),
        "request_prompt_tokens": (1, 7),
        "request_prefill_kv_computed_tokens": (1, 3),
        "request_generation_tokens": (1, 5),
        "request_params_max_tokens": (1, 6),
        "request_params_n": (1, 2),
    }
    for name, (count, total) in truth.items():
        assert found[f"jaxserve:{name}_count"] == count, name
        assert found[f"jaxserve:{name}_sum"] == pytest.approx(total), name
    assert found['jaxserve:inter_token_latency_seconds_bucket{le="0.2"}'] == 1
    assert found['jaxserve:inter_token_latency_seconds_bucket{le="0.3"}'] == 4
    assert found['jaxserve:request_success_total{finished_reason="stop"}'] == 1
    assert found['jaxserve:request_success_total{finished_reason="abort"}'] == 0


def test_the_longest_sample_of_a_prompt():
    """It is counted once all samples have ended, aborted ones too; those of a prompt whose clocks are lost, never."""
    metrics = Metrics("tiny", lambda: None)
    samples_of = [
        [metrics.clock(0.0, msgspec.structs.replace(request(1, n=n), group_id=name, sample=i)) for i in range(n)]
        for name, n in (("a", 3), ("b", 1), ("c", 2))
    ]
    for number, sequence in enumerate(itertools.chain(*samples_of[:2])):
        sequence.record_tokens(5 * (number + 1) % 11)  # 5, 10, 4; 9
    for sequence in samples_of[0][:2]:
        sequence.record_end(FinishReason.STOP)
        assert samples(metrics.render().decode())["jaxserve:request_max_num_generation_tokens_count"] == 0
    samples_of[2][0].record_end(FinishReason.STOP)
    samples_of[0][2].record_end(FinishReason.ABORT)
    samples_of[1][0].record_end(FinishReason.LENGTH)
    found = samples(metrics.render().decode())
    assert found["jaxserve:request_max_num_generation_tokens_count"] == 2
    assert found["jaxserve:request_max_num_generation_tokens_sum"] == 10 + 9


def test_a_first_event_with_several_tokens(clock: Clock):
    metrics = Metrics("tiny", lambda: None)
    metrics.clock(99.0, request(1)).record_tokens(3)
    found = samples(metrics.render().decode())
    assert found["jaxserve:time_to_first_token_seconds_sum"] == pytest.approx(1.0)
    assert found["jaxserve:inter_token_latency_seconds_count"] == 2


def test_a_request_without_tokens_has_no_token_times(clock: Clock):
    metrics = Metrics("tiny", lambda: None)
    metrics.clock(99.0, request(4)).record_end(FinishReason.ABORT)
    one = metrics.clock(99.0, request(4))
    one.record_tokens(1, queue_seconds=0.0)
    one.record_end(FinishReason.LENGTH)
    found = samples(metrics.render().decode())
    counts = {
        "e2e_request_latency_seconds": 2,
        "request_prompt_tokens": 2,
        "request_generation_tokens": 2,
        "request_decode_time_seconds": 1,
        "request_queue_time_seconds": 1,
        "request_time_per_output_token_seconds": 0,
    }
    assert {name: found[f"jaxserve:{name}_count"] for name in counts} == counts


INFO = EngineInfo(
    max_model_len=512,
    vocab_size=1000,
    page_size=16,
    num_pages=40,
    max_running_requests=32,
    chunked_prefill_size=256,
    device="fake",
    state_bytes=7000,
    dtype="float32",
    attention_backend="reference",
    num_programs=1,
    startup_seconds={},
    schedule_policy="lpm",
    free_bytes=3000,
    working_bytes=1000,
    memory_bound=True,
)
STATS = EngineStats(
    num_running=3,
    num_waiting=9,
    num_deferred=2,
    num_queued_tokens=450,
    num_free_pages=10,
    num_evictable_pages=18,
    num_pages=40,
    num_window_pages=(20, 10),
    num_free_window_pages=(5, 4),
    token_usage=0.75,
    new_token_ratio=0.65,
    num_steps=70,
    num_preemptions=5,
    num_retractions=3,
    prompt_tokens=1000,
    prefill_tokens=820,
    generation_tokens=200,
    cache_query_tokens=800,
    cache_hit_tokens=600,
    num_host_pages=90,
    num_host_pages_used=70,
    host_save_pages=75,
    host_load_pages=11,
    num_states=40,
    num_states_used=10,
    num_state_snapshots=23,
    state_snapshots_taken=90,
    state_snapshots_found=60,
    state_snapshots_evicted=50,
    state_recomputed_tokens=4000,
    decode_steps=50,
    coarse_decode_steps=4,
    decode_rows=120,
    decode_bucket_rows=160,
    mixed_tokens=900,
    mixed_bucket_tokens=1200,
    compiles_after_ready=1,
    num_drafts=10,
    forced_tokens=13,
    draft_tokens=28,
    accepted_tokens=14,
    accepted_by_position=(8, 5, 1),
    step_tokens=1020,
    steps_by_tokens=(50, 10, *(0,) * 5, 9, *(0,) * 5, 1),
    expert_tokens=((), (30, 10, 20), (0, 60, 0)),
    stages=(StageTimes(9.5, 0.5), StageTimes(7.25, 2.75)),
)


def test_engine_metrics():
    found = samples(Metrics("tiny", lambda: (INFO, STATS), {"cache_dtype": "auto"}).render().decode())
    truth = {
        "num_requests_running": 3,
        "num_running_reqs": 3,
        "num_requests_waiting": 9,
        "num_queued_tokens": 450,
        "num_queue_reqs": 9,
        'num_requests_waiting_by_reason{reason="capacity"}': 7,
        'num_requests_waiting_by_reason{reason="deferred"}': 2,
        "token_usage": 0.75,
        "kv_cache_usage_perc": 0.75,
        "full_token_usage": 1 - 28 / 40,
        "swa_token_usage": 0.75,
        "num_used_tokens": (40 - 10 - 18) * 16,
        "kv_available_tokens": 10 * 16,
        "num_evictable_tokens": 18 * 16,
        "hicache_host_used_tokens": 70 * 16,
        "hicache_host_total_tokens": 90 * 16,
        "hicache_saved_tokens_total": 75 * 16,
        "hicache_loaded_tokens_total": 11 * 16,
        "mamba_usage": 0.25,
        "state_bytes": 7000,
        "num_states": 40,
        "num_states_used": 10,
        "num_state_snapshots": 23,
        "state_snapshots_taken_total": 90,
        "state_snapshots_found_total": 60,
        "state_snapshots_evicted_total": 50,
        "state_recomputed_tokens_total": 4000,
        "max_total_num_tokens": 640,
        "page_size": 16,
        "num_pages": 40,
        "context_len": 512,
        "max_running_requests": 32,
        "utilization": 0.75,
        "available_gpu_mem_bytes": 3000,
        "working_memory_bytes": 1000,
        "kv_cache_memory_bound": 1,
        "new_token_ratio": 0.65,
        "cache_hit_rate": 0.75,
        "spec_accept_length": 2.4,
        "spec_accept_rate": 0.5,
        "spec_decode_num_drafts_total": 10,
        "forced_tokens_total": 13,
        "spec_decode_num_draft_tokens_total": 28,
        "spec_decode_num_accepted_tokens_total": 14,
        'spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 8,
        'spec_decode_num_accepted_tokens_per_pos_total{position="2"}': 1,
        'spec_decode_accepted_tokens_per_draft_bucket{le="0.0"}': 2,
        'spec_decode_accepted_tokens_per_draft_bucket{le="1.0"}': 5,
        'spec_decode_accepted_tokens_per_draft_bucket{le="2.0"}': 9,
        'spec_decode_accepted_tokens_per_draft_bucket{le="3.0"}': 10,
        'spec_decode_accepted_tokens_per_draft_bucket{le="+Inf"}': 10,
        "spec_decode_accepted_tokens_per_draft_count": 10,
        "spec_decode_accepted_tokens_per_draft_sum": 14,
        "prompt_tokens_total": 1000,
        "generation_tokens_total": 200,
        'prompt_tokens_by_source_total{source="local_compute"}': 200,
        'prompt_tokens_by_source_total{source="local_cache_hit"}': 600,
        'realtime_tokens_total{mode="prefill_compute"}': 820,
        'realtime_tokens_total{mode="prefill_cache"}': 600,
        'realtime_tokens_total{mode="decode"}': 200,
        "prefix_cache_queries_total": 800,
        "prefix_cache_hits_total": 600,
        "cached_tokens_total": 600,
        "num_preemptions_total": 5,
        "num_retracted_reqs_total": 3,
        "engine_steps_total": 70,
        "compiles_after_ready_total": 1,
        'decode_steps_total{cuda_graph="True"}': 46,
        'decode_steps_total{cuda_graph="False"}': 4,
        'bucket_used_total{kind="decode"}': 120,
        'bucket_used_total{kind="mixed"}': 900,
        'bucket_padding_total{kind="decode"}': 40,
        'bucket_padding_total{kind="mixed"}': 300,
        'bucket_occupancy{kind="decode"}': 0.75,
        'bucket_occupancy{kind="mixed"}': 0.75,
        'iteration_tokens_total_bucket{le="1.0"}': 50,
        'iteration_tokens_total_bucket{le="256.0"}': 60,
        'iteration_tokens_total_bucket{le="16384.0"}': 69,
        'iteration_tokens_total_bucket{le="+Inf"}': 70,
        "iteration_tokens_total_count": 70,
        "iteration_tokens_total_sum": 1020,
        'expert_tokens_total{expert="0"}': 30,
        'expert_tokens_total{expert="1"}': 70,
        'expert_tokens_total{expert="2"}': 20,
        'expert_balance{layer="1"}': 60 / 90,
        'expert_balance{layer="2"}': 60 / 180,
        'stage_compute_seconds_total{stage="0"}': 9.5,
        'stage_compute_seconds_total{stage="1"}': 7.25,
        'stage_wait_seconds_total{stage="0"}': 0.5,
        'stage_wait_seconds_total{stage="1"}': 2.75,
    }
    assert {name: found[f"jaxserve:{name}"] for name in truth} == truth
    [info] = [name for name in found if name.startswith("jaxserve:engine_info")]
    assert 'schedule_policy="lpm"' in info
    assert 'page_size="16"' in info
    [cache] = [name for name in found if name.startswith("jaxserve:cache_config_info")]
    for label in (
        'block_size="16"',
        'num_gpu_blocks="40"',
        'num_cpu_blocks="90"',
        'kv_cache_size_tokens="640"',
        'cache_dtype="auto"',
    ):
        assert label in cache
    covered = {name.partition("{")[0] for name in truth}
    server = {name.removeprefix("jaxserve:").partition("{")[0] for name in found}
    others = {name for name in server if not name.endswith(("_bucket", "_sum", "_count", "_created"))} - covered
    assert others == {
        *("cache_config_info", "engine_info", "gen_throughput", "avg_generation_throughput_toks_per_s"),
        *("avg_prompt_throughput_toks_per_s", "request_success_total", "admission_rejections_total"),
        *("num_stored_responses", "stored_response_bytes", "stored_responses_evicted_total"),
    }, "each has a test here"


async def test_responses_that_are_kept():
    async with over_asgi(max_stored_responses=2) as server:
        for number in range(5):
            answer = await server.http.post("/v1/responses", json={"input": str(number), "max_output_tokens": 1})
        await server.http.delete(f"/v1/responses/{answer.json()['id']}")
        found = await scrape(server)
        assert found["jaxserve:num_stored_responses"] == 1
        assert found["jaxserve:stored_response_bytes"] == server.state.responses.num_bytes > 0
        assert found["jaxserve:stored_responses_evicted_total"] == 3


async def test_requests_by_route():
    """Paths and methods that clients make up are no labels; probes and scrapes don't count."""
    async with over_asgi(api_key="k") as server:
        http = server.http
        key = {"authorization": "Bearer k"}
        for body in ({"prompt": "a"}, {"prompt": "b", "stream": True}, {}):
            await http.post("/v1/completions", json=body, headers=key)
        await http.post("/v1/completions", json={})
        await http.get("/v1/models/tiny", headers=key)
        await http.request("BREW", "/v1/models", headers=key)
        for path in ("/nothing/here", "/health", "/metrics", "/openapi.json"):
            await http.get(path, headers=key)
        server.engine.hold()
        held = asyncio.ensure_future(http.post("/generate", json={"text": "a"}, headers=key))
        await server.engine.wait_for(lambda: len(server.engine.submitted) == 3)
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        await server.state.idle.wait()
        found = await scrape(server)
    expected = {
        ("/v1/completions", "POST", "2xx"): 2,
        ("/v1/completions", "POST", "4xx"): 1,
        ("/v1/models/{model:path}", "GET", "2xx"): 1,
        ("/v1/models", "other", "4xx"): 1,
        ("none", "GET", "4xx"): 1,
        ("none", "POST", "4xx"): 1,
        ("/openapi.json", "GET", "2xx"): 1,
        ("/generate", "POST", "none"): 1,
    }
    counted = {
        tuple(re.findall(r'="([^"]*)"', name)): value
        for name, value in found.items()
        if name.startswith("jaxserve:http_requests_total")
    }
    assert counted == expected
    responses = [name for name in found if name.startswith("jaxserve:http_responses_total")]
    assert sum(found[name] for name in responses) == sum(expected.values()) - 1
    route = 'handler="/v1/completions",method="POST"'
    assert found[f'jaxserve:http_responses_total{{{route},status_code="400"}}'] == 1
    name = f"jaxserve:http_request_duration_seconds_count{{{route}}}"
    assert found[name] == 3


def test_metrics_before_the_engine_is_loaded():
    found = samples(Metrics("tiny", lambda: None).render().decode())
    assert found["jaxserve:num_requests_running"] == 0
    assert found["jaxserve:cache_hit_rate"] == 0
    assert found["jaxserve:spec_accept_length"] == 1
    assert "jaxserve:num_states" not in found, "only models with states have it"


def test_throughputs(clock: Clock):
    stats = STATS
    metrics = Metrics("tiny", lambda: (INFO, stats))
    metrics.tick()
    clock.now += 4.0
    stats = msgspec.structs.replace(STATS, generation_tokens=300, prompt_tokens=1200)
    found = samples(metrics.render().decode())
    assert found["jaxserve:gen_throughput"] == 25.0
    assert found["jaxserve:avg_generation_throughput_toks_per_s"] == 25.0
    assert found["jaxserve:avg_prompt_throughput_toks_per_s"] == 50.0


def test_each_replica_has_its_throughput(clock: Clock):
    replicas = [ReplicaStats(1, EngineStats()), ReplicaStats(2, EngineStats())]
    metrics = Metrics("tiny", lambda: None, replicas=lambda: replicas)
    assert metrics.replica_throughput(0) == 0.0
    metrics.tick()
    clock.now += 2.0
    replicas[1] = ReplicaStats(2, EngineStats(generation_tokens=30))
    metrics.tick()
    assert [metrics.replica_throughput(number) for number in (0, 1)] == [0.0, 15.0]


def test_two_servers_in_a_process_have_separate_metrics():
    one, other = Metrics("tiny", lambda: None), Metrics("tiny", lambda: None)
    one.clock(0.0, request(1)).record_end(FinishReason.STOP)
    name = 'jaxserve:request_success_total{finished_reason="stop"}'
    assert samples(one.render().decode())[name] == 1
    assert samples(other.render().decode())[name] == 0


async def test_a_scripted_run():
    async with over_asgi(
        engine={"refuse": lambda request: "broken" if request.sampling.seed == 13 else None}
    ) as server:
        http = server.http
        await http.post("/v1/completions", json={"prompt": ["abc", "de"], "n": 2, "max_tokens": 5})
        await http.post("/v1/completions", json={"prompt": "abcd", "max_tokens": 20, "stop": "y", "stream": True})
        await http.post("/v1/completions", json={"prompt": "abcd", "seed": 13})
        await http.post("/v1/completions", json={"prompt": "abcd", "max_tokens": -1})
        server.engine.hold()
        held = asyncio.ensure_future(http.post("/v1/completions", json={"prompt": "xy", "max_tokens": 9, "n": 3}))
        await server.engine.wait_for(lambda: len(server.engine.submitted) == 9)
        while_running = await scrape(server)
        await server.engine.step()
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        await server.state.idle.wait()
        found = await scrape(server)
    assert while_running["jaxserve:num_requests_running"] == 3
    assert found["jaxserve:num_requests_running"] == 0
    # 4 sequences of 5 tokens, one from "d" to the stop string "y", 3 of one token before the disconnect
    text = "".join(chr(ord("a") + (ord("d") + step) % 26) for step in range(26))
    until_stop = text.index("y") + 1
    assert found["jaxserve:prompt_tokens_total"] == 2 * 3 + 2 * 2 + 4 + 3 * 2
    assert found["jaxserve:generation_tokens_total"] >= 20 + until_stop + 3
    assert found["jaxserve:time_to_first_token_seconds_count"] == 4 + 1 + 3
    assert found["jaxserve:inter_token_latency_seconds_count"] == 4 * 4 + until_stop - 1
    assert found["jaxserve:e2e_request_latency_seconds_count"] == 4 + 1 + 1 + 3
    assert found["jaxserve:request_queue_time_seconds_count"] == 4 + 1 + 3
    assert found["jaxserve:request_queue_time_seconds_sum"] == 0.25 * 8
    assert found["jaxserve:request_prompt_tokens_count"] == 9
    assert found["jaxserve:request_prompt_tokens_sum"] == 2 * 3 + 2 * 2 + 4 + 4 + 3 * 2
    assert found["jaxserve:request_generation_tokens_sum"] == 20 + until_stop + 3
    assert found["jaxserve:request_max_num_generation_tokens_sum"] == 2 * 5 + until_stop + 1
    assert found["jaxserve:request_max_num_generation_tokens_count"] == 2 + 1 + 1 + 1
    assert found["jaxserve:request_prefill_kv_computed_tokens_sum"] == 2 * 3 + 2 * 2 + 4 + 3 * 2
    assert found["jaxserve:request_params_max_tokens_sum"] == 4 * 5 + 20 + 16 + 3 * 9
    assert (found["jaxserve:request_params_n_count"], found["jaxserve:request_params_n_sum"]) == (5, 2 + 2 + 1 + 1 + 3)
    reasons = {"length": 4, "stop": 1, "error": 1, "abort": 3}
    assert {r: found[f'jaxserve:request_success_total{{finished_reason="{r}"}}'] for r in reasons} == reasons


async def test_a_scrape_refreshes_the_engines_statistics(server: ServerUnderTest):
    server.engine.stats = msgspec.structs.replace(server.engine.stats, num_running=7)
    assert (await scrape(server))["jaxserve:num_requests_running"] == 0
