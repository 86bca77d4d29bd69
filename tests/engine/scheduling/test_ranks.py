"""Several data-parallel ranks under one scheduler: the choice of a rank, and their separation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from jaxserve.api_types import FinishReason
from jaxserve.engine.scheduling.bucket_stats import BucketStats
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.step_plan import StepPlan
from tests.engine.conftest import make_capacity, make_request
from tests.engine.scheduling.test_scheduler import answer, last_events, make_scheduler, planned, run

SYSTEM = [7, 3, 9, 1] * 10


def make(num_ranks: int = 2, **options: Any) -> Scheduler:
    sizes = {
        name: options.pop(name)
        for name in list(options)
        if name in ("num_slots", "num_pages", "decode_buckets", "token_buckets")
    }
    capacity = make_capacity(num_ranks=num_ranks, **sizes)
    return make_scheduler(capacity=capacity, **options)


def ranks_of(plan: StepPlan) -> dict[str, int]:
    return {chunk.request_id: chunk.rank for chunk in plan.chunks}


def step(scheduler: Scheduler) -> StepPlan:
    plan = planned(scheduler)
    scheduler.commit(plan, answer(plan))
    return plan


def test_sequences_are_spread_evenly() -> None:
    scheduler = make(4)
    for i in range(12):
        scheduler.add(make_request(f"r{i}", 4))
    assert Counter(ranks_of(planned(scheduler)).values()) == dict.fromkeys(range(4), 3)


def test_tokens_are_spread_evenly() -> None:
    """One long prompt costs as much as several short ones."""
    scheduler = make(2, chunked_prefill_size=200, max_prefill_tokens=200, max_num_batched_tokens=200)
    scheduler.add(make_request("long", 60))
    for i in range(2):
        scheduler.add(make_request(f"r{i}", 4))
    plan = planned(scheduler)
    assert ranks_of(plan) == {"long": 0, "r0": 1, "r1": 1}
    assert plan.max_rank_tokens(2) == 60


def test_a_request_goes_where_its_prefix_is() -> None:
    scheduler = make(3, policy="fcfs", chunked_prefill_size=64)
    scheduler.add(make_request("other"))
    scheduler.add(make_request("first", [*SYSTEM, 1], max_tokens=1))
    home = ranks_of(step(scheduler))["first"]
    assert home == 1
    scheduler.add(make_request("second", [*SYSTEM, 2], max_tokens=20))
    plan = step(scheduler)
    assert (ranks_of(plan)["second"], plan.opens[0].num_cached_tokens) == (home, len(SYSTEM))


def test_a_prefix_is_computed_again_rather_than_crowding_its_rank() -> None:
    """Requests go to their prefix's rank until it runs more than the other by a quarter of its slots."""
    scheduler = make(2, num_slots=7, decode_buckets=(7,))
    scheduler.add(make_request("first", [*SYSTEM, 1], max_tokens=20))
    home = ranks_of(step(scheduler))["first"]
    places = []
    for i in range(2, 5):
        scheduler.add(make_request(f"r{i}", [*SYSTEM, i], max_tokens=20))
        places.append(ranks_of(step(scheduler))[f"r{i}"])
    assert places == [home, 1 - home, 1 - home], "afterwards the prefix is in both caches"


def test_slot_and_page_numbers_are_local_to_a_rank() -> None:
    scheduler = make(2)
    for name in "ab":
        scheduler.add(make_request(name, 8))
    plan = planned(scheduler)
    first, second = plan.opens
    assert (first.rank, second.rank) == (0, 1)
    assert first.slot == second.slot
    assert plan.chunks[0].new_pages == plan.chunks[1].new_pages


def test_a_full_rank_sends_requests_to_the_next() -> None:
    """If the best rank has no free slot, another rank computes the prefix again."""
    scheduler = make(2, num_slots=1)
    scheduler.add(make_request("a", [*SYSTEM, 1], max_tokens=9))
    step(scheduler)
    scheduler.add(make_request("b", [*SYSTEM, 2], max_tokens=9))
    scheduler.add(make_request("c", [*SYSTEM, 3], max_tokens=9))
    assert ranks_of(step(scheduler)) == {"a": 0, "b": 1}
    assert scheduler.num_waiting == 1


def test_one_rank_retracts_and_the_other_goes_on() -> None:
    scheduler = make(2, num_pages=8, num_slots=2, policy="fcfs")
    for name in "abc":
        scheduler.add(make_request(name, 12, max_tokens=16))
    events, executor = run(scheduler)
    assert scheduler.stats().num_preemptions > 0
    assert all(event.finish_reason is FinishReason.LENGTH for event in last_events(events).values())
    alone = [plan for plan in executor.plans if len({chunk.rank for chunk in plan.chunks}) == 1]
    assert len(alone) < len(executor.plans)


def test_a_request_too_long_for_one_rank_is_rejected() -> None:
    scheduler = make(4, num_pages=8)
    refused = scheduler.add(make_request("a", 40))
    assert refused is not None
    assert "more than the 32 of the whole KV cache" in (refused.error or "")


def test_flushing_forgets_the_prefixes_of_all_ranks() -> None:
    scheduler = make(3)
    run(scheduler, *(make_request(name, 9, max_tokens=1) for name in "abc"))
    stats = scheduler.stats()
    assert stats.num_pages == 3 * 64
    assert scheduler.flush_cache() == stats.num_evictable_pages == 6
    assert scheduler.stats().num_free_pages == 3 * 64


def test_prompt_logprobs_limit_the_chunks_of_all_ranks() -> None:
    """The program with prompt log probabilities holds 8 tokens per rank."""
    scheduler = make(2, policy="fcfs")
    scheduler.add(make_request("scored", 20, max_tokens=0, prompt_logprobs=0))
    scheduler.add(make_request("plain", 30))
    plan = step(scheduler)
    assert {chunk.request_id: chunk.length for chunk in plan.chunks} == {"scored": 8, "plain": 8}
    while ranks_of(plan).get("scored") is not None:
        assert plan.max_rank_tokens(2) <= 8
        plan = step(scheduler)


def test_a_prompt_with_logprobs_is_not_starved_by_long_prompts_on_other_ranks() -> None:
    scheduler = make(2, policy="fcfs", chunked_prefill_size=16)
    for i in range(4):
        scheduler.add(make_request(f"long{i}", 60, max_tokens=1))
    step(scheduler)
    scheduler.add(make_request("scored", 20, max_tokens=0, prompt_logprobs=0))
    for i in range(20):
        scheduler.add(make_request(f"late{i}", 60, max_tokens=1))
    for _ in range(30):
        if "scored" in ranks_of(step(scheduler)):
            return
    raise AssertionError("the prompt with log probabilities never starts")


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_a_request_waits_for_budget_on_the_rank_with_its_prefix(policy: Any) -> None:
    """A rank with a long cached prefix is worth waiting one step for, when others have used up its budget."""
    prefix = [5, 6, 7, 8] * 40
    capacity = make_capacity(
        num_ranks=2, num_slots=16, decode_buckets=(16,), prompt_logprob_tokens=20, num_pages=200, max_model_len=400
    )
    scheduler = make_scheduler(
        capacity=capacity, policy=policy, chunked_prefill_size=16, max_prefill_tokens=16, max_num_batched_tokens=64
    )
    run(scheduler, make_request("first", [*prefix, 1], max_tokens=1))
    for i in range(3):
        scheduler.add(make_request(f"r{i}", [*prefix, *range(10 * i, 10 * i + 10)], max_tokens=2))
    steps = []
    while scheduler.has_work:
        steps.append(step(scheduler))
    opened = {opened.rank: opened for plan in steps for opened in plan.opens}
    assert set(opened) == {0}, "each starts on the rank that has its prefix"


def test_priority_preempts_on_one_rank_only() -> None:
    scheduler = make(2, policy="priority", num_slots=1)
    for name in "ab":
        scheduler.add(make_request(name, 8, max_tokens=30))
    step(scheduler)
    scheduler.add(make_request("urgent", 8, max_tokens=2, priority=5))
    assert len(step(scheduler).chunks) == 2
    assert scheduler.stats().num_preemptions == 1


def test_padding_counts_the_rows_of_all_ranks() -> None:
    scheduler = make(2, num_slots=4)
    for i in range(3):
        scheduler.add(make_request(f"r{i}", 4, max_tokens=5))
    plan = step(scheduler)
    count = BucketStats(make_capacity(num_ranks=2))
    count.count(plan)
    assert (count.used["mixed"], count.sizes["mixed"]) == (12, 32)
    count.count(step(scheduler))
    assert (count.used["decode"], count.sizes["decode"], count.last_bucket) == (3, 4, 2)


def test_steps_are_counted_by_their_tokens() -> None:
    scheduler = make(2, num_slots=4)
    for i in range(3):
        scheduler.add(make_request(f"r{i}", 4, max_tokens=5))
    sizes = [sum(chunk.length for chunk in step(scheduler).chunks) for _ in range(3)]
    assert sizes == [12, 3, 3]
    stats = scheduler.stats()
    assert stats.step_tokens == 18
    assert stats.steps_by_tokens[:4] == (0, 2, 1, 0)
    assert sum(stats.steps_by_tokens) == 3
