from __future__ import annotations

import logging
from typing import Any

import pytest

from jaxserve.api_types import EngineRequest, FinishReason, TokenEvent, Usage
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.scheduling.admission import QueueLimits
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.errors import ConfigError
from jaxserve.step_plan import StepPlan, StepResult
from tests.engine.conftest import make_capacity, make_request
from tests.engine.fake_executor import FakeExecutor, run_alone


def make_scheduler(*, capacity: Any = None, **limits: Any) -> Scheduler:
    defaults = {
        "chunked_prefill_size": 32,
        "max_prefill_tokens": 64,
        "max_num_batched_tokens": 64,
        "conservativeness": 0.0,
    }
    return Scheduler(capacity or make_capacity(), **{**defaults, **limits})


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    assert scheduler.check_integrity() == []
    return plan


def answer(plan: StepPlan, token: int = 1) -> StepResult:
    """Return a result in which every sampling chunk samples `token`."""
    return StepResult(
        tokens=[[token] if chunk.sample else [] for chunk in plan.chunks], logprobs={}, prompt_logprobs={}
    )


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(chunk.request_id, chunk.start, chunk.length) for chunk in plan.chunks]


def run(scheduler: Scheduler, *requests: EngineRequest, overlap: bool = True) -> tuple[list[TokenEvent], FakeExecutor]:
    executor = FakeExecutor(scheduler._capacity)
    loop = EngineLoop(scheduler, executor, overlap=overlap)
    events = [event for request in requests if (event := scheduler.add(request)) is not None]
    while loop.has_work:
        events += loop.step()
        assert scheduler.check_integrity() == []
    return events, executor


def last_events(events: list[TokenEvent]) -> dict[str, TokenEvent]:
    last = [event for event in events if event.finish_reason is not None]
    assert len({event.request_id for event in last}) == len(last)
    return {event.request_id: event for event in last}


def test_decodes_come_first_then_running_prompts_then_new_ones() -> None:
    scheduler = make_scheduler(chunked_prefill_size=8)
    scheduler.add(make_request("a", 4))
    plan = planned(scheduler)
    assert shape(plan) == [("a", 0, 4)]
    scheduler.commit(plan, answer(plan))
    scheduler.add(make_request("b", 12))
    scheduler.add(make_request("c", 5))
    plan = planned(scheduler)
    assert shape(plan) == [("a", 4, 1), ("b", 0, 8)]
    assert plan.num_decodes == 1
    assert plan.chunks[0].tokens is None
    assert plan.chunks[1].tokens == make_request("b", 12).prompt_ids[:8]
    assert [(chunk.logits, chunk.sample) for chunk in plan.chunks] == [(1, True), (0, False)]
    scheduler.commit(plan, answer(plan))
    plan = planned(scheduler)
    assert shape(plan) == [("a", 5, 1), ("b", 8, 4), ("c", 0, 4)]
    assert [(chunk.logits, chunk.sample) for chunk in plan.chunks] == [(1, True), (1, True), (0, False)]
    scheduler.commit(plan, answer(plan))
    plan = planned(scheduler)
    assert shape(plan) == [("a", 6, 1), ("b", 12, 1), ("c", 4, 1)]
    assert plan.num_decodes == 2


@pytest.mark.parametrize(
    ("limits", "length"),
    [
        ({"chunked_prefill_size": 7}, 7),
        ({"max_prefill_tokens": 6}, 6),
        ({"max_num_batched_tokens": 5}, 5),
        ({"chunked_prefill_size": 1000, "max_prefill_tokens": 1000, "max_num_batched_tokens": 1000}, 30),
    ],
)
def test_each_limit_bounds_a_step(limits: dict[str, int], length: int) -> None:
    scheduler = make_scheduler(capacity=make_capacity(token_buckets=(30,)), **limits)
    scheduler.add(make_request("a", 40))
    assert shape(planned(scheduler)) == [("a", 0, length)]


def test_a_long_prompt_leaves_room_for_others_while_there_are_some() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=6, chunked_prefill_size=16)
    scheduler.add(make_request("a", 44))
    assert shape(planned(scheduler)) == [("a", 0, 16)]
    for name, length in (("b", 20), ("c", 5)):
        scheduler.add(make_request(name, length))
    assert shape(planned(scheduler)) == [("a", 16, 6), ("b", 0, 6), ("c", 0, 4)]
    assert shape(planned(scheduler)) == [("a", 22, 6), ("b", 6, 6), ("c", 4, 1)]
    for name in "bc":
        scheduler.abort(name)
    assert shape(planned(scheduler)) == [("a", 28, 16)]


@pytest.mark.parametrize(("threshold", "found"), [(0, 56), (40, 40), (100, 56)])
def test_a_long_prompt_beside_a_decode(threshold: int, found: int) -> None:
    sizes = dict.fromkeys(("chunked_prefill_size", "max_prefill_tokens", "max_num_batched_tokens"), 64)
    scheduler = make_scheduler(long_prefill_token_threshold=threshold, **sizes)
    scheduler.add(make_request("a", 4))
    planned(scheduler)
    scheduler.add(make_request("b", 56))
    assert shape(planned(scheduler)) == [("a", 4, 1), ("b", 0, found)]


def test_prompts_of_several_steps_start_only_if_there_are_pages_for_the_rest_of_all() -> None:
    scheduler = make_scheduler(capacity=make_capacity(num_pages=24), long_prefill_token_threshold=8)
    for name in "abc":
        scheduler.add(make_request(name, 40, max_tokens=1))
    assert shape(planned(scheduler)) == [("a", 0, 8), ("b", 0, 8)]
    for start in (8, 16, 24, 32):
        assert shape(planned(scheduler)) == [("a", start, 8), ("b", start, 8)]


def test_decodes_count_towards_the_tokens_of_a_step() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add(make_request("a", 4))
    planned(scheduler)
    scheduler.add(make_request("b", 40))
    assert shape(planned(scheduler)) == [("a", 4, 1), ("b", 0, 9)]


@pytest.mark.parametrize("name", ["chunked_prefill_size", "max_prefill_tokens", "max_num_batched_tokens"])
def test_a_limit_below_one_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
        make_scheduler(**{name: 0})


def test_a_step_just_above_a_bucket_is_cut_to_it() -> None:
    scheduler = make_scheduler(capacity=make_capacity(token_buckets=(16, 64)))
    scheduler.add(make_request("a", 24))
    assert shape(planned(scheduler)) == [("a", 0, 16)]
    assert shape(planned(scheduler)) == [("a", 16, 8)]


def test_pages_are_allocated_for_what_a_chunk_writes() -> None:
    scheduler = make_scheduler(chunked_prefill_size=6)
    scheduler.add(make_request("a", 8, max_tokens=10))
    given = [planned(scheduler).chunks[0].new_pages for _ in range(7)]
    assert [len(pages[0]) for pages in given] == [2, 0, 1, 0, 0, 0, 1]


def test_slots_open_with_a_seed() -> None:
    scheduler = make_scheduler(random_seed=5)
    scheduler.add(make_request("a", max_tokens=1))
    scheduler.add(make_request("b", max_tokens=3, seed=77))
    plan = planned(scheduler)
    first, second = plan.opens
    assert first.sampling.seed is not None
    assert second.sampling.seed == 77
    again = make_scheduler(random_seed=5)
    again.add(make_request("x"))
    assert planned(again).opens[0].sampling.seed == first.sampling.seed
    other = make_scheduler(random_seed=6)
    other.add(make_request("x"))
    assert planned(other).opens[0].sampling.seed != first.sampling.seed


def test_a_slot_is_reused_in_the_plan_after_the_last_token() -> None:
    scheduler = make_scheduler(capacity=make_capacity(num_slots=1))
    scheduler.add(make_request("a", max_tokens=1))
    scheduler.add(make_request("b", max_tokens=1))
    planned(scheduler)
    plan = planned(scheduler)  # a's last token is planned, so b need not wait for it
    assert [opened.slot for opened in plan.opens] == [0]


def test_a_length_stop_is_known_at_planning() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", max_tokens=2))
    first, second = planned(scheduler), planned(scheduler)
    assert scheduler.plan() is None
    [event] = scheduler.commit(first, answer(first))
    assert event.finish_reason is None
    [event] = scheduler.commit(second, answer(second, 9))
    assert (event.token_ids, event.finish_reason) == ([9], FinishReason.LENGTH)
    assert not scheduler.has_work


def test_output_ends_at_the_context_length() -> None:
    events, _ = run(make_scheduler(), make_request("a", 60, max_tokens=100))
    last = last_events(events)["a"]
    assert last.finish_reason is FinishReason.LENGTH
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (60, 4)


def test_a_token_computed_past_a_stop_is_dropped() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", stop_ids=(5,), max_tokens=10))
    first = planned(scheduler)
    second = planned(scheduler)
    [event] = scheduler.commit(first, answer(first, 5))
    assert (event.token_ids, event.finish_reason, event.stop_id) == ([5], FinishReason.STOP, 5)
    assert scheduler.commit(second, answer(second, 6)) == []
    assert scheduler.check_integrity() == []
    assert scheduler.stats().generation_tokens == 1


def test_a_step_may_return_several_tokens_and_stop_within_them() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", stop_ids=(5,), max_tokens=10))
    scheduler.add(make_request("b", max_tokens=2))
    plan = planned(scheduler)
    result = StepResult(tokens=[[1, 5, 2], [1, 2, 3]], logprobs={}, prompt_logprobs={})
    a, b = scheduler.commit(plan, result)
    assert (a.token_ids, a.finish_reason, a.stop_id) == ([1, 5], FinishReason.STOP, 5)
    assert (b.token_ids, b.finish_reason, b.stop_id) == ([1, 2], FinishReason.LENGTH, None)
    assert a.usage is not None
    assert a.usage.completion_tokens == 2


def test_a_stop_id_counts_only_after_min_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", stop_ids=(5,), max_tokens=10, min_tokens=2))
    reasons = []
    for _ in range(3):
        plan = planned(scheduler)
        [event] = scheduler.commit(plan, answer(plan, 5))
        reasons.append(event.finish_reason)
    assert reasons == [None, None, FinishReason.STOP]


def test_max_tokens_zero_means_prefill_only() -> None:
    scheduler = make_scheduler(chunked_prefill_size=3)
    events, executor = run(scheduler, make_request("a", 8, max_tokens=0, prompt_logprobs=1))
    [event] = events
    assert (event.token_ids, event.finish_reason) == ([], FinishReason.LENGTH)
    assert event.prompt_logprobs == run_alone(make_request("a", 8, max_tokens=0, prompt_logprobs=1), 64).prompt_logprobs
    assert not any(chunk.sample for plan in executor.plans for chunk in plan.chunks)


def test_prompt_logprobs_bound_the_step_and_name_the_next_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3))
    plan = planned(scheduler)
    scheduler.commit(plan, answer(plan))
    scheduler.add(make_request("b", 12, prompt_logprobs=0))
    scheduler.add(make_request("c", 12))
    plan = planned(scheduler)
    assert shape(plan) == [("a", 3, 1), ("b", 0, 7)]
    assert (plan.chunks[1].logits, plan.chunks[1].target) == (7, make_request("b", 12).prompt_ids[7])
    plan = planned(scheduler)
    assert shape(plan) == [("a", 4, 1), ("b", 7, 5), ("c", 0, 2)]
    assert (plan.chunks[1].logits, plan.chunks[1].target) == (5, None)


def test_a_plan_is_greedy_if_all_sampling_requests_are() -> None:
    scheduler = make_scheduler(chunked_prefill_size=8)
    scheduler.add(make_request("a", 4))
    scheduler.add(make_request("b", 8, temperature=1.0))
    assert planned(scheduler).greedy, "b does not sample yet"
    assert not planned(scheduler).greedy
    assert not planned(scheduler).greedy


def test_a_prompt_starts_when_its_pages_and_one_more_are_free() -> None:
    scheduler = make_scheduler(capacity=make_capacity(num_pages=10, token_buckets=(64,)), chunked_prefill_size=20)
    scheduler.add(make_request("a", 24))
    scheduler.add(make_request("b", 15))
    scheduler.add(make_request("c", 2))
    assert shape(planned(scheduler)) == [("a", 0, 20)]
    plan = planned(scheduler)
    assert shape(plan) == [("a", 20, 4)], "b's 4 pages are free but not one more, and no request passes it"
    scheduler.abort("b")
    assert shape(planned(scheduler)) == [("a", 24, 1), ("c", 0, 2)]


def test_at_most_one_prompt_is_partly_planned() -> None:
    scheduler = make_scheduler(chunked_prefill_size=8)
    for name in "abc":
        scheduler.add(make_request(name, 12))
    assert shape(planned(scheduler)) == [("a", 0, 8)]
    assert shape(planned(scheduler)) == [("a", 8, 4), ("b", 0, 4)]
    assert shape(planned(scheduler)) == [("a", 12, 1), ("b", 4, 8)]
    assert shape(planned(scheduler)) == [("a", 13, 1), ("b", 12, 1), ("c", 0, 8)]


def test_the_requests_whose_prompts_a_step_computes_are_limited() -> None:
    scheduler = make_scheduler(chunked_prefill_size=16, prefill_max_requests=2)
    for name, length in (("a", 4), ("b", 20), ("c", 4), ("d", 4)):
        scheduler.add(make_request(name, length))
    assert shape(planned(scheduler)) == [("a", 0, 4), ("b", 0, 12)]
    assert shape(planned(scheduler)) == [("a", 4, 1), ("b", 12, 8), ("c", 0, 4)]
    assert shape(planned(scheduler))[-1] == ("d", 0, 4)


def test_a_step_computes_one_of_several_prompts_with_the_same_beginning() -> None:
    scheduler = make_scheduler(prefill_max_requests=1)
    prompt = make_request("same", 40).prompt_ids
    requests = [make_request(name, prompt, max_tokens=2) for name in "abc"]
    events, executor = run(scheduler, *requests)
    assert last_events(events).keys() == set("abc")
    assert max(sum(chunk.tokens is not None for chunk in plan.chunks) for plan in executor.plans) == 1


def test_partly_planned_prompts_are_retracted_for_decodes_and_restart() -> None:
    capacity = make_capacity(num_slots=2, num_pages=9, decode_buckets=(2,))
    requests = [make_request("a", 8, max_tokens=20), make_request("b", 20, max_tokens=4)]
    scheduler = make_scheduler(capacity=capacity, chunked_prefill_size=1)
    events, executor = run(scheduler, *requests)
    assert scheduler.stats().num_preemptions > 0
    opened = [opened.prompt_ids for plan in executor.plans for opened in plan.opens]
    assert len(opened) == 2 + scheduler.stats().num_preemptions
    for request in requests:
        tokens = [token for event in events if event.request_id == request.request_id for token in event.token_ids]
        assert tokens == run_alone(request, 64).token_ids


@pytest.mark.parametrize("overlap", [True, False])
def test_retraction_neither_loses_nor_duplicates_tokens(overlap: bool, caplog: pytest.LogCaptureFixture) -> None:
    capacity = make_capacity(num_pages=10)
    requests = [
        make_request(f"r{i}", 6, max_tokens=25, temperature=1.0, seed=i, logprobs=1, prompt_logprobs=1)
        for i in range(6)
    ]
    scheduler = make_scheduler(capacity=capacity)
    with caplog.at_level(logging.WARNING, "jaxserve.engine"):
        events, executor = run(scheduler, *requests, overlap=overlap)
    retracted = scheduler.stats().num_preemptions
    assert retracted > 0
    assert "decode out of memory happened, #retracted_reqs: 1" in caplog.text
    for request in requests:
        expected = run_alone(request, 64)
        own = [event for event in events if event.request_id == request.request_id]
        assert [token for event in own for token in event.token_ids] == expected.token_ids
        assert [entry for event in own for entry in event.logprobs or []] == expected.logprobs
        assert own[0].prompt_logprobs == expected.prompt_logprobs
        assert all(event.prompt_logprobs is None for event in own[1:])
    assert scheduler.stats().generation_tokens == 6 * 25
    assert scheduler.stats().prompt_tokens == 6 * 6
    recomputed = [opened for plan in executor.plans for opened in plan.opens if opened.output_ids]
    assert recomputed
    assert len([opened for plan in executor.plans for opened in plan.opens]) == 6 + retracted


def test_a_retracted_request_does_not_start_in_the_same_plan() -> None:
    capacity = make_capacity(num_slots=3, num_pages=6, decode_buckets=(3,))
    scheduler = make_scheduler(capacity=capacity)
    for name in ("a", "b"):
        scheduler.add(make_request(name, 8, max_tokens=40))
    before = 0
    while scheduler.stats().num_preemptions == 0:
        before = scheduler.num_running
        plan = planned(scheduler)
        scheduler.commit(plan, answer(plan))
    assert before == 2
    assert [chunk.request_id for chunk in plan.chunks] == ["a"]
    assert plan.opens == []
    assert scheduler.num_waiting == 1


def test_the_only_running_request_fails_if_the_pool_is_too_small() -> None:
    capacity = make_capacity(num_pages=5)
    scheduler = make_scheduler(capacity=capacity)
    events, _ = run(scheduler, make_request("a", 10, max_tokens=40), make_request("b", 12, max_tokens=2))
    last = last_events(events)
    assert last["a"].finish_reason is FinishReason.ERROR
    assert "20 tokens (5 pages of 4)" in (last["a"].error or "")
    assert "--max-total-tokens" in (last["a"].error or "")
    assert last["b"].finish_reason is FinishReason.LENGTH
    tokens = [token for event in events if event.request_id == "a" for token in event.token_ids]
    assert tokens == run_alone(make_request("a", 10, max_tokens=11), 64).token_ids


def test_a_stop_in_flight_avoids_the_error() -> None:
    capacity = make_capacity(num_pages=1)
    scheduler = make_scheduler(capacity=capacity)
    scheduler.add(make_request("a", 4, stop_ids=(5,), max_tokens=10))
    plan = planned(scheduler)
    assert scheduler.plan() is None, "the pool is full, but the token in flight may be the last"
    [event] = scheduler.commit(plan, answer(plan, 5))
    assert event.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("prompt", "error"),
    [(0, "prompt is empty"), (64, "has 64 tokens.*context length of 64"), (41, "has 41 tokens, more than the 40")],
)
def test_a_request_that_can_never_fit_is_rejected_at_once(prompt: int, error: str) -> None:
    scheduler = make_scheduler(capacity=make_capacity(num_pages=10))
    event = scheduler.add(make_request("a", prompt))
    assert event is not None
    assert event.finish_reason is FinishReason.ERROR
    assert event.usage is not None
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(event.error)
    assert not scheduler.has_work


def test_a_prompt_that_fills_the_pool_still_runs() -> None:
    scheduler = make_scheduler(capacity=make_capacity(num_pages=10))
    events, _ = run(scheduler, make_request("a", 40, max_tokens=1), make_request("b", 40, max_tokens=1))
    assert {event.finish_reason for event in last_events(events).values()} == {FinishReason.LENGTH}


def test_a_second_request_with_an_open_id_is_rejected() -> None:
    scheduler = make_scheduler()
    assert scheduler.add(make_request("a")) is None
    event = scheduler.add(make_request("a"))
    assert event is not None
    assert "already open" in (event.error or "")
    assert scheduler.num_waiting == 1


def test_a_full_queue_rejects_requests_beyond_the_free_slots() -> None:
    limits = QueueLimits(max_queued_requests=1)
    scheduler = make_scheduler(capacity=make_capacity(num_slots=2), limits=limits)
    assert [scheduler.add(make_request(name)) for name in "abc"] == [None] * 3
    assert refusal(scheduler, "d") == (
        "queue full: 1 requests wait beyond the free slots and --max-queued-requests is 1"
    )
    planned(scheduler)
    assert scheduler.num_waiting == 1
    assert refusal(scheduler, "e")


def refusal(scheduler: Scheduler, name: str, length: int = 3, **fields: Any) -> str | None:
    event = scheduler.add(make_request(name, length, **fields))
    return None if event is None else event.error


def test_requests_that_run_count_against_the_limit_of_open_ones() -> None:
    scheduler = make_scheduler(limits=QueueLimits(max_num_queued_reqs=2))
    assert [refusal(scheduler, name) for name in "ab"] == [None] * 2
    planned(scheduler)
    assert refusal(scheduler, "c") == "queue full: 2 requests are open and --max-num-queued-reqs is 2"
    scheduler.abort("a")
    assert refusal(scheduler, "c") is None


@pytest.mark.parametrize("setting", ["max_queued_requests", "max_num_queued_reqs"])
def test_all_samples_of_a_prompt_are_accepted_or_none(setting: str) -> None:
    scheduler = make_scheduler(capacity=make_capacity(num_slots=1), limits=QueueLimits(**{setting: 5}))
    last = 3 if setting == "max_queued_requests" else 2  # a slot is free

    def sample(group: str, index: int, n: int) -> str | None:
        request = make_request(f"{group}{index}", sample=index, group_id=group, n=n)
        event = scheduler.add(request)
        return None if event is None else event.error

    assert [sample("a", index, 3) for index in range(3)] == [None] * 3
    refused = [sample("b", index, 4) for index in range(4)]
    assert "this one adds 4" in (refused[0] or "")
    assert len(set(refused)) == 1, "the others go with the first"
    assert [sample("c", index, last) for index in range(last)] == [None] * last
    assert sample("d", 0, 1)


def test_a_request_is_refused_while_as_many_tokens_wait_as_the_limit() -> None:
    capacity = make_capacity(num_slots=4, max_model_len=64)
    scheduler = make_scheduler(capacity=capacity, limits=QueueLimits(max_num_queued_tokens=40), chunked_prefill_size=16)
    assert refusal(scheduler, "long", 60, max_tokens=2) is None, "into an empty queue, any prompt is accepted"
    assert refusal(scheduler, "a") == (
        "queue full: 60 prompt tokens wait to be computed and --max-num-queued-tokens is 40"
    )
    planned(scheduler)
    assert scheduler.stats().num_queued_tokens == 44
    assert refusal(scheduler, "a")
    planned(scheduler)
    assert scheduler.stats().num_queued_tokens == 28
    assert refusal(scheduler, "b", 12) is None
    assert refusal(scheduler, "c")
    scheduler.abort("long")
    assert scheduler.stats().num_queued_tokens == 12
    assert refusal(scheduler, "c") is None


def test_cached_tokens_do_not_wait_once_their_request_has_started() -> None:
    scheduler = make_scheduler(limits=QueueLimits(max_num_queued_tokens=1000), chunked_prefill_size=4)
    prompt = [*range(40)]
    run(scheduler, make_request("a", prompt[:20], max_tokens=1))
    scheduler.add(make_request("b", prompt, max_tokens=1))
    assert scheduler.stats().num_queued_tokens == 40
    planned(scheduler)
    stats = scheduler.stats()
    assert (stats.cache_hit_tokens, stats.prefill_tokens, stats.num_queued_tokens) == (20, 24, 16)
    assert stats.num_finished == 1


@pytest.mark.parametrize("setting", ["max_num_queued_reqs", "max_num_queued_tokens"])
def test_a_limit_of_0_refuses_everything(setting: str) -> None:
    assert f"--{setting.replace('_', '-')} is 0" in (
        refusal(make_scheduler(limits=QueueLimits(**{setting: 0})), "a") or ""
    )


@pytest.mark.parametrize("moment", ["waiting", "prefilling", "decoding", "ending", "retracted"])
def test_abort_frees_everything_with_one_event(moment: str) -> None:
    capacity = make_capacity(num_slots=2, num_pages=6, decode_buckets=(2,))
    scheduler = make_scheduler(capacity=capacity, chunked_prefill_size=4)
    scheduler.add(make_request("a", 8, max_tokens=2 if moment == "ending" else 40))
    flights = []
    if moment == "retracted":
        scheduler.add(make_request("b", 8, max_tokens=40))
        while not scheduler.stats().num_preemptions:
            plan = planned(scheduler)
            scheduler.commit(plan, answer(plan))
    else:
        steps = {"waiting": 0, "prefilling": 1, "decoding": 3, "ending": 3}[moment]
        flights = [planned(scheduler) for _ in range(steps)]
    target = "b" if moment == "retracted" else "a"
    event = scheduler.abort(target)
    assert event is not None
    assert event.finish_reason is FinishReason.ABORT
    assert event.usage is not None
    assert scheduler.abort(target) is None
    assert scheduler.check_integrity() == []
    # The id may be used again, and results in flight for the first request don't go to the second.
    assert scheduler.add(make_request(target, 3, max_tokens=1)) is None
    for plan in flights:
        assert scheduler.commit(plan, answer(plan)) == []
    scheduler.abort("a")
    scheduler.abort("b")
    stats = scheduler.stats()
    assert stats.num_free_pages + stats.num_evictable_pages == stats.num_pages
    assert scheduler.check_integrity() == []


def test_many_waiting_requests_do_not_slow_a_step() -> None:
    scheduler = make_scheduler(capacity=make_capacity(num_slots=1))
    for i in range(10_000):
        scheduler.add(make_request(f"r{i}", 1))
    planned(scheduler)
    waiting = scheduler._table.waiting
    waiting.__class__ = type("Watched", (type(waiting),), {"__iter__": None})
    assert scheduler.plan() is not None, "a step looks only at the head of the queue"


def test_check_integrity_reports_problems() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 6))
    scheduler.add(make_request("b", 6))
    planned(scheduler)
    table = scheduler._table
    a, b = table.running
    b.pages[0][1] = a.pages[0][1]
    assert any("page 1 has 2 owners" in problem for problem in scheduler.check_integrity())
    b.pages[0][1] = 3
    assert scheduler.check_integrity() == []
    assert a.node is not None
    a.node.locks += 1
    assert any("counts 2 locks, not 1" in problem for problem in scheduler.check_integrity())
    a.node.locks -= 1
    assert scheduler.check_integrity() == []
    b.slot = a.slot
    assert "slot 0 is free or owned 2 times" in scheduler.check_integrity()
    b.slot = 1
    table.waiting.add(a)
    assert any("listed 2 times" in problem for problem in scheduler.check_integrity())


SYSTEM = [7, 3, 9, 1] * 10  # 40 tokens: 10 pages


def test_a_prompt_reuses_whole_pages_of_earlier_prompts_and_outputs() -> None:
    scheduler = make_scheduler()
    first = make_request("a", [1, 2, 3, 4, 5, 6], max_tokens=8)
    run(scheduler, first)
    answered = run_alone(first, 64).token_ids
    events, executor = run(scheduler, make_request("b", [*first.prompt_ids, *answered, 9], max_tokens=1))
    [opened] = executor.plans[0].opens
    # 14 tokens are known, but the last sampled one was never computed: 3 whole pages.
    assert opened.num_cached_tokens == 12
    assert len(opened.cached_pages[0]) == 3
    assert events[-1].usage == Usage(15, 1, cached_tokens=12)


@pytest.mark.parametrize(("length", "cached"), [(8, 4), (9, 8), (7, 4)])
def test_the_last_token_of_a_prompt_is_always_computed(length: int, cached: int) -> None:
    scheduler = make_scheduler()
    prompt = list(range(1, length + 1))
    for _ in range(2):
        events, executor = run(scheduler, make_request("a", prompt, max_tokens=1))
    assert executor.plans[0].opens[0].num_cached_tokens == cached
    assert events[-1].usage is not None
    assert events[-1].usage.cached_tokens == cached


def test_namespaces_share_nothing() -> None:
    scheduler = make_scheduler()
    for namespace in ("", "one", "two"):
        _, executor = run(scheduler, make_request("a", SYSTEM, max_tokens=1, namespace=namespace))
        assert executor.plans[0].opens[0].num_cached_tokens == 0
    _, executor = run(scheduler, make_request("a", SYSTEM, max_tokens=1, namespace="one"))
    assert executor.plans[0].opens[0].num_cached_tokens == 36


def test_prompt_logprobs_are_computed_not_looked_up() -> None:
    scheduler = make_scheduler()
    run(scheduler, make_request("a", SYSTEM, max_tokens=1))
    request = make_request("b", SYSTEM, max_tokens=1, prompt_logprobs=0)
    events, executor = run(scheduler, request)
    assert executor.plans[0].opens[0].num_cached_tokens == 0
    assert events[0].prompt_logprobs == run_alone(request, 64).prompt_logprobs


def test_requests_that_arrive_together_compute_a_shared_prefix_once() -> None:
    capacity = make_capacity(num_slots=8, decode_buckets=(8,), prompt_logprob_tokens=9)
    scheduler = make_scheduler(capacity=capacity, chunked_prefill_size=64)
    requests = [make_request(f"r{i}", [*SYSTEM, i, i + 1], max_tokens=2) for i in range(6)]
    events, executor = run(scheduler, *requests, overlap=True)
    prefilled = sum(c.length for plan in executor.plans for c in plan.chunks[plan.num_decodes :])
    assert prefilled == 40 + 2 + 5 * 2
    cached = [last.usage.cached_tokens for last in last_events(events).values() if last.usage is not None]
    assert sorted(cached) == [0] + [40] * 5
    assert scheduler.stats().cache_hit_tokens == 5 * 40
    for request in requests:
        tokens = [token for event in events if event.request_id == request.request_id for token in event.token_ids]
        assert tokens == run_alone(request, 64).token_ids


def test_a_request_deferred_for_a_prefix_is_passed_and_counted() -> None:
    scheduler = make_scheduler(chunked_prefill_size=64)
    scheduler.add(make_request("a", [*SYSTEM, 1]))
    scheduler.add(make_request("b", [*SYSTEM, 2]))
    scheduler.add(make_request("c", 8))
    assert shape(planned(scheduler)) == [("a", 0, 41), ("c", 0, 8)]
    assert scheduler.stats().num_deferred == 1
    assert shape(planned(scheduler))[-1] == ("b", 40, 1)
    assert scheduler.stats().num_deferred == 0


def test_a_disabled_cache_keeps_and_shares_nothing() -> None:
    scheduler = make_scheduler(prefix_cache=False)
    requests = [make_request(f"r{i}", SYSTEM, max_tokens=3) for i in range(3)]
    _, executor = run(scheduler, *requests)
    assert all(opened.num_cached_tokens == 0 for plan in executor.plans for opened in plan.opens)
    stats = scheduler.stats()
    assert (stats.num_free_pages, stats.num_evictable_pages, stats.cache_hit_tokens) == (stats.num_pages, 0, 0)


def test_a_restart_after_a_retraction_is_not_a_cache_hit() -> None:
    scheduler = make_scheduler(capacity=make_capacity(num_pages=10))
    requests = [make_request(f"r{i}", 6, max_tokens=25) for i in range(4)]
    events, executor = run(scheduler, *requests)
    stats = scheduler.stats()
    assert stats.num_preemptions > 0
    assert any(opened.num_cached_tokens for plan in executor.plans for opened in plan.opens), "no cached pages are used"
    assert (stats.cache_hit_tokens, stats.cache_query_tokens) == (0, 4 * 6)
    assert all(last.usage is not None and last.usage.cached_tokens == 0 for last in last_events(events).values())


def test_a_flush_takes_no_pages_from_running_requests() -> None:
    scheduler = make_scheduler()
    run(scheduler, make_request("a", SYSTEM, max_tokens=1))
    scheduler.add(make_request("b", [*SYSTEM, 1], max_tokens=4))
    flights = [planned(scheduler)]
    assert flights[0].opens[0].num_cached_tokens == 40
    assert scheduler.flush_cache() == 0, "b uses all cached pages"
    assert scheduler.check_integrity() == []
    scheduler.add(make_request("c", [*SYSTEM, 2], max_tokens=4))
    flights.append(planned(scheduler))
    assert [opened.num_cached_tokens for opened in flights[1].opens] == [0]
    for plan in flights:
        scheduler.commit(plan, answer(plan))
    while scheduler.has_work:
        plan = planned(scheduler)
        scheduler.commit(plan, answer(plan))
    stats = scheduler.stats()
    assert stats.num_free_pages + stats.num_evictable_pages == stats.num_pages
    assert scheduler.flush_cache() == stats.num_evictable_pages > 0
    assert scheduler.stats().num_free_pages == stats.num_pages


def test_conservativeness_reserves_room_for_running_requests() -> None:
    """With c = 1, 0.7 of 38 tokens are reserved for `a`: 7 pages; with c = 0.3 it is 2."""
    for conservativeness, pages, starts in ((1.0, 12, False), (1.0, 13, True), (0.3, 7, False), (0.3, 8, True)):
        capacity = make_capacity(num_pages=pages, max_model_len=48)
        scheduler = make_scheduler(capacity=capacity, conservativeness=conservativeness)
        scheduler.add(make_request("a", 8, max_tokens=41))
        planned(scheduler)  # plans one of a's 40 tokens
        scheduler.add(make_request("b", 8, max_tokens=1))
        plan = planned(scheduler)
        assert [opened.prompt_ids for opened in plan.opens] == [make_request("b", 8).prompt_ids] * starts, pages


def test_the_new_token_ratio_falls_with_decode_steps_and_resets_when_idle() -> None:
    scheduler = make_scheduler(capacity=make_capacity(num_pages=300, max_model_len=1000), conservativeness=1.0)
    assert scheduler.stats().new_token_ratio == pytest.approx(0.7)
    scheduler.add(make_request("a", 4, max_tokens=900))
    for step in range(800):
        plan = planned(scheduler)
        scheduler.commit(plan, answer(plan))
        expected = 0.7 - (0.7 - 0.098) * min(step, 600) / 600
        assert scheduler.stats().new_token_ratio == pytest.approx(expected)
    scheduler.abort("a")
    scheduler.add(make_request("b", 4))
    assert scheduler.stats().new_token_ratio == pytest.approx(0.7)


def test_a_retraction_sets_the_ratio_from_the_survivors(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler(capacity=make_capacity(num_pages=8))
    for name in "ab":
        scheduler.add(make_request(name, 8, max_tokens=40))
    with caplog.at_level(logging.WARNING, "jaxserve.engine"):
        while not scheduler.stats().num_preemptions:
            plan = planned(scheduler)
            scheduler.commit(plan, answer(plan))
    # One survivor with 9 tokens of 40, and then 20 more are expected: 29 / 41; its next step is planned already.
    assert "#retracted_reqs: 1, #new_token_ratio: 0.0000 -> 0.7073, " in caplog.text
    assert "total_cumulative_preemption_cnt: 1" in caplog.text


def test_a_higher_priority_preempts_a_lower_one_and_both_finish_correctly() -> None:
    capacity = make_capacity(num_slots=2, decode_buckets=(2,))
    low = [make_request(f"low{i}", 8, max_tokens=12, priority=1) for i in range(2)]
    high = make_request("high", 8, max_tokens=4, priority=2)
    scheduler = make_scheduler(capacity=capacity, policy="priority")
    run(scheduler, *low, high)
    assert scheduler.stats().num_preemptions == 0, "they arrived together, so the higher one went first"
    scheduler = make_scheduler(capacity=capacity, policy="priority")
    executor = FakeExecutor(capacity)
    loop = EngineLoop(scheduler, executor)
    for request in low:
        loop.add(request)
    events = [event for _ in range(4) for event in loop.step()]
    loop.add(high)
    loop.add(make_request("equal", 8, max_tokens=2, priority=1))
    while loop.has_work:
        events += loop.step()
        assert scheduler.check_integrity() == []
    assert scheduler.stats().num_preemptions == 1
    ends = [event.request_id for event in events if event.finish_reason is not None]
    assert ends[0] == "high"
    opened = [opened.prompt_ids for plan in executor.plans for opened in plan.opens]
    names = ["low0", "low1", "high", "low1", "equal"]
    assert opened == [make_request(name, 8).prompt_ids for name in names], "an equal priority preempts no request"
    for request in [*low, high]:
        tokens = [token for event in events if event.request_id == request.request_id for token in event.token_ids]
        assert tokens == run_alone(request, 64).token_ids


def test_padding_is_counted_by_program() -> None:
    capacity = make_capacity(fine_decode_rows=2)
    scheduler = make_scheduler(capacity=capacity)
    run(scheduler, *(make_request(f"r{i}", 5, max_tokens=2 if i < 2 else 4) for i in range(3)), overlap=False)
    stats = scheduler.stats()
    assert (stats.mixed_tokens, stats.mixed_bucket_tokens) == (15, 16)
    # One step of three rows in the program of four, then two steps of one row.
    assert (stats.decode_steps, stats.decode_rows, stats.decode_bucket_rows) == (3, 5, 6)
    assert stats.coarse_decode_steps == 1
    assert scheduler.decode_steps_by_rows == {3: 1, 1: 2}


def test_prompts_beside_decodes_take_no_longer_than_their_limit() -> None:
    """A step of 1 ms a token: alone, a prompt fills the step; beside a decode, steps grow up to 20 ms."""
    now = 0.0
    capacity = make_capacity(num_pages=400, max_model_len=400, token_buckets=(16, 64, 128, 256))
    sizes = dict.fromkeys(("chunked_prefill_size", "max_prefill_tokens", "max_num_batched_tokens"), 256)
    scheduler = make_scheduler(capacity=capacity, **sizes, mixed_step_seconds=0.07, clock=lambda: now)

    def step() -> int:
        nonlocal now
        plan = planned(scheduler)
        size = next(size for size in capacity.token_buckets if size >= sum(chunk.length for chunk in plan.chunks))
        now += size / 1000
        scheduler.commit(plan, answer(plan))
        return sum(chunk.length for chunk in plan.chunks if chunk.tokens is not None)

    scheduler.add(make_request("first", prompt=300, max_tokens=60))
    assert [step(), step()] == [256, 44]
    scheduler.add(make_request("second", prompt=300, max_tokens=1))
    found = []
    while (length := step()) and len(found) < 20:
        found.append(length)
    assert found == [63, 63, 63, 63, 48]
