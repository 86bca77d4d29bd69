"""Tests each rule with a scenario that triggers it, and a similar one that must not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxserve.observability.sample import Sample, Settings
from jaxserve.observability.tuning_advice import TuningAdvice
from jaxserve.observability.tuning_rules import apply_rules

HEALTHY: dict[str, Any] = {
    "running": 100,
    "waiting": 100,
    "deferred": 0,
    "max_running": 256,
    "token_usage": 0.95,
    "full_token_usage": 0.95,
    "swa_token_usage": 0.0,
    "new_token_ratio": 0.4,
    "generation_tokens": 0,
    "retractions": 0,
    "queried_tokens": 0,
    "hit_tokens": 0,
    "decode_steps": 0,
    "coarse_decode_steps": 0,
    "decode_used": 0,
    "decode_padding": 0,
    "num_drafts": 0,
    "draft_tokens": 0,
    "accepted_tokens": 0,
    "compiles_after_ready": 0,
}
LPM = Settings("lpm", 1.0)


def seen(*changes: dict[str, Any], seconds: float = 30.0) -> list[Sample]:
    """Return samples over `seconds` that differ from a healthy server's by `changes`."""
    step = seconds / max(len(changes) - 1, 1)
    return [Sample(seconds=index * step, **HEALTHY | change) for index, change in enumerate(changes)]


def all_along(**change: Any) -> list[Sample]:
    return seen(*[change] * 10)


def grown(seconds: float = 30.0, **counters: int) -> list[Sample]:
    """Return samples in which counters grow from 5 by the given numbers."""
    start = dict.fromkeys(counters, 5)
    end = {name: 5 + value for name, value in counters.items()}
    return seen(start, start, end, end, seconds=seconds)


def rules(samples: list[Sample], settings: Settings = LPM) -> list[str]:
    return [advice.rule for advice in apply_rules(samples, settings)]


def only(samples: list[Sample], settings: Settings = LPM) -> TuningAdvice:
    found = apply_rules(samples, settings)
    assert len(found) == 1, found
    return found[0]


def test_a_healthy_server_gets_no_advice() -> None:
    counters = dict.fromkeys(("decode_steps", "generation_tokens", "decode_used"), 1000)
    assert rules(seen({}, {}, {}, counters)) == []
    assert rules(all_along(running=0, waiting=0, token_usage=0.0)) == [], "idle"


def test_the_client_is_the_bottleneck() -> None:
    advice = only(seen({}, *[{"waiting": 0, "running": 7}] * 6, {"waiting": 0, "running": 0}))
    assert advice.rule == "the client is the bottleneck"
    assert "empty in 6 of 7 samples" in advice.figure
    assert "7 of 256" in advice.figure
    assert "submit requests faster" in advice.what_to_do
    assert rules(seen(*[{}] * 7, *[{"waiting": 0}] * 6)) == [], "now and then is fine"
    assert rules(seen(*[{"waiting": 0}] * 2, *[{"waiting": 0, "running": 0}] * 8)) == [], "too little to judge by"


def test_too_conservative() -> None:
    advice = only(all_along(token_usage=0.6, new_token_ratio=0.7))
    assert advice.rule == "too conservative"
    assert "0.60" in advice.figure
    assert "queue 100" in advice.figure
    assert "new_token_ratio 0.70" in advice.figure
    assert "--schedule-conservativeness to a value like 0.3 (it is 1)" in advice.what_to_do
    assert "(it is" not in only(all_along(token_usage=0.6), Settings()).what_to_do
    assert "is 0.3 already" in only(all_along(token_usage=0.6), Settings("fcfs", 0.3)).what_to_do


@pytest.mark.parametrize(
    "samples",
    [
        all_along(token_usage=0.9),
        all_along(token_usage=0.6, deferred=100),
        seen(*[{"token_usage": 0.6}] * 4, *[{}] * 6),
    ],
    ids=["well used", "they wait for a prefix", "not often"],
)
def test_not_too_conservative(samples: list[Sample]) -> None:
    assert rules(samples) == []


def test_frequent_retractions() -> None:
    advice = only(grown(retractions=2, seconds=30.0))
    assert advice.rule == "frequent retractions"
    assert "2 requests were retracted in 30 s (4.0 a minute)" in advice.figure
    assert "--schedule-conservativeness to a value like 1.3 (it is 1)" in advice.what_to_do
    assert "is 1.3 already" in only(grown(retractions=2), Settings("lpm", 1.3)).what_to_do
    assert rules(grown(retractions=1, seconds=30.0)) == [], "one may happen"
    assert rules(grown(retractions=10, seconds=600.0)) == [], "about one a minute is fine"
    assert rules(grown(retractions=11, seconds=600.0)) == ["frequent retractions"]


@pytest.mark.parametrize(
    "problem",
    [
        "engine process ended with code 1: a step failed: XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory",
        "engine process ended with code 1: a step failed: MemoryError: out of memory",
    ],
)
def test_out_of_memory(problem: str) -> None:
    advice = only(seen({}, {}, {"problem": problem}))
    assert advice.rule == "out of memory"
    assert advice.figure == problem
    for flag in ("--chunked-prefill-size to 4096 or 2048", "--max-running-requests", "--mem-fraction-static"):
        assert flag in advice.what_to_do


def test_an_ended_engine() -> None:
    advice = only(seen({}, {}, {"problem": "engine process ended with code -9 (SIGKILL)"}))
    assert (advice.rule, advice.figure) == ("not serving", "engine process ended with code -9 (SIGKILL)")


def test_decode_batches_beyond_the_fine_programs() -> None:
    advice = only(grown(decode_steps=100, coarse_decode_steps=40))
    assert advice.rule == "decode batches beyond --cuda-graph-max-bs"
    assert "40 of 100 decode steps" in advice.figure
    assert "--cuda-graph-max-bs to 100 or more" in advice.what_to_do
    assert rules(grown(decode_steps=100, coarse_decode_steps=5)) == []
    assert rules(grown(decode_steps=100, coarse_decode_steps=0)) == []


def test_padded_decodes() -> None:
    advice = only(grown(decode_used=500, decode_padding=500))
    assert advice.rule == "padded decode batches"
    assert advice.figure.startswith("50% of the rows")
    assert "a size near 100 to --cuda-graph-bs" in advice.what_to_do
    assert rules(grown(decode_used=700, decode_padding=300)) == []


def test_a_queue_too_long() -> None:
    advice = only(all_along(waiting=2500), Settings("fcfs", 1.0))
    assert advice.rule == "queue too long"
    assert "queue 2500" in advice.figure
    assert rules(all_along(waiting=2000), Settings("fcfs", 1.0)) == []


def test_a_queue_beyond_lpms_reach() -> None:
    advice = only(all_along(waiting=129))
    assert advice.rule == "queue beyond lpm's reach"
    assert "queue 129" in advice.figure
    assert rules(all_along(waiting=128)) == []
    assert rules(all_along(waiting=129), Settings("fcfs", 1.0)) == []
    assert rules(all_along(waiting=129), Settings()) == []


def test_no_shared_prefixes() -> None:
    advice = only(grown(queried_tokens=20_000, hit_tokens=100))
    assert advice.rule == "no shared prefixes"
    assert "100 of 20000 prompt tokens" in advice.figure
    assert "--schedule-policy fcfs" in advice.what_to_do
    assert rules(grown(queried_tokens=20_000, hit_tokens=1000)) == [], "some are shared"
    assert rules(grown(queried_tokens=5000, hit_tokens=0)) == [], "too little to judge by"
    assert rules(grown(queried_tokens=20_000, hit_tokens=100), Settings("fcfs", 1.0)) == []


def test_an_empty_queue_has_no_order() -> None:
    samples = seen({"waiting": 0}, *[{"waiting": 0, "queried_tokens": 20_000}] * 5)
    assert rules(samples) == ["the client is the bottleneck"]


def test_memory_left_over() -> None:
    settings = Settings("lpm", 1.0, free_bytes=12 * 2**30, working_bytes=2**30, memory_bound=True)
    advice = only(all_along(), settings)
    assert advice.rule == "memory left over"
    assert "12.00 GB" in advice.figure
    assert "--mem-fraction-static" in advice.what_to_do
    assert rules(all_along(), dataclasses.replace(settings, memory_bound=False)) == [], "the cache wants no more"
    assert rules(all_along(), dataclasses.replace(settings, working_bytes=4 * 2**30)) == [], "the programs need it"
    assert rules(all_along(), dataclasses.replace(settings, free_bytes=8 * 2**30)) == []


def test_memory_too_short() -> None:
    settings = Settings("lpm", 1.0, free_bytes=2**30, working_bytes=2 * 2**30)
    advice = only(all_along(), settings)
    assert advice.rule == "memory too short"
    assert "1.00 GB" in advice.figure
    assert "2.00 GB" in advice.figure
    assert rules(all_along(), dataclasses.replace(settings, free_bytes=2 * 2**30)) == []
    assert rules(all_along(), dataclasses.replace(settings, free_bytes=0)) == [], "a server that doesn't say"


def test_one_kv_group_is_full_and_the_other_is_not() -> None:
    advice = only(all_along(full_token_usage=0.3, swa_token_usage=0.95))
    assert (advice.rule, "0.30" in advice.figure, "Raise --swa" in advice.what_to_do) == ("windows full", True, True)
    advice = only(all_along(swa_token_usage=0.4))
    assert (advice.rule, "Lower --swa" in advice.what_to_do) == ("whole sequences full", True)
    assert rules(all_along(swa_token_usage=0.8)) == []
    assert rules(all_along(full_token_usage=0.3, swa_token_usage=0.95, deferred=100)) == [], "nothing waits for room"


def test_all_slots_taken() -> None:
    advice = only(all_along(running=256, token_usage=0.5))
    assert advice.rule == "all slots taken", "and not: too conservative"
    assert "all 256 slots" in advice.figure
    assert "--max-running-requests (it is 256)" in advice.what_to_do
    assert rules(all_along(running=256, token_usage=0.95)) == [], "memory is full as well"


def test_a_flag_is_about_one_rank() -> None:
    [advice] = apply_rules(all_along(running=256, token_usage=0.5), Settings(num_ranks=4))
    assert "all 256 slots" in advice.figure
    assert "--max-running-requests (it is 64 a rank)" in advice.what_to_do


def test_compiles_while_serving() -> None:
    advice = only(all_along(compiles_after_ready=2))
    assert (advice.rule, advice.figure[:10]) == ("compiles while serving", "2 programs")


def test_several_rules_the_most_severe_first() -> None:
    samples = seen(*[{"waiting": 2500, "compiles_after_ready": 1}] * 4, {"problem": "gone", "compiles_after_ready": 1})
    assert rules(samples) == ["not serving", "compiles while serving", "queue too long", "queue beyond lpm's reach"]
