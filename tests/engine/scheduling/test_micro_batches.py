"""Micro-batches of pipeline stages: the turns, what is in flight, even sizes, and prompts between them."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from jaxserve.api_types import EngineRequest, TokenEvent
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.speculation.speculation import DraftedRequest, Speculation
from jaxserve.step_plan import StepPlan
from tests.engine.conftest import make_capacity, make_request
from tests.engine.fake_executor import FakeExecutor, run_alone
from tests.engine.scheduling.test_scheduler import answer, make_scheduler, planned


class _Pipeline:
    """A loop over a fake executor with pipeline stages, and the most steps that were in flight when one was added."""

    def __init__(
        self, num_stages: int, *, num_slots: int = 32, num_ranks: int = 1, overlap: bool = True, **limits: Any
    ) -> None:
        capacity = make_capacity(
            num_slots=num_slots,
            num_pages=16 * num_slots,
            decode_buckets=(num_slots,),
            prompt_logprob_tokens=num_slots + 1,
            num_ranks=num_ranks,
            num_stages=num_stages,
        )
        self.scheduler = make_scheduler(capacity=capacity, overlap=overlap, **limits)
        self._executor = FakeExecutor(capacity, overlap=overlap)
        self.loop = EngineLoop(self.scheduler, self._executor, overlap=overlap)
        self.plans = self._executor.plans
        self.most_in_flight = 0

    def add(self, *names: str, prompt: int = 4) -> None:
        for name in names:
            assert self.loop.add(make_request(name, prompt, max_tokens=64)) is None

    def steps(self, count: int) -> list[list[str]]:
        """Run until `count` more steps are dispatched; return the requests that each decodes."""
        before = len(self.plans)
        for _ in range(100 * count):
            dispatched = len(self.plans)
            if dispatched == before + count:
                break
            in_flight = self._executor.num_in_flight
            self.loop.step()
            assert self.scheduler.check_integrity() == []
            self.most_in_flight = max(self.most_in_flight, in_flight + len(self.plans) - dispatched)
        return [decoded(plan) for plan in self.plans[before:]]


def decoded(plan: StepPlan) -> list[str]:
    return [chunk.request_id for chunk in plan.chunks[: plan.num_decodes]]


def prompts(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(chunk.request_id, chunk.start, chunk.length) for chunk in plan.chunks[plan.num_decodes :]]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_decodes_are_divided_evenly_and_each_part_comes_in_turn(num_stages: int, overlap: bool) -> None:
    pipeline = _Pipeline(num_stages, overlap=overlap)
    names = [f"r{i}" for i in range(4 * num_stages)]
    pipeline.add(*names)  # all prompts fit in the first step
    pipeline.steps(3 * num_stages)
    pipeline.most_in_flight = 0

    steps = pipeline.steps(3 * num_stages)

    assert sorted(itertools.chain(*steps[:num_stages])) == sorted(names)
    assert {len(step) for step in steps} == {4}
    assert steps[num_stages:] == steps[:-num_stages]
    # One more is planned while the oldest is fetched
    assert pipeline.most_in_flight == num_stages + overlap


def test_a_request_decodes_as_many_steps_after_its_prompt_as_there_are_stages() -> None:
    pipeline = _Pipeline(4)
    pipeline.add("a", "b", "c", "d")
    pipeline.steps(8)
    pipeline.add("e")
    pipeline.steps(1)
    assert [name for name, _, _ in prompts(pipeline.plans[-1])] == ["e"]

    steps = pipeline.steps(8)

    assert [index + 1 for index, step in enumerate(steps) if "e" in step] == [4, 8]


@pytest.mark.parametrize(("overlap", "most"), [(False, 1), (True, 2)])
def test_a_request_alone_takes_every_step(overlap: bool, most: int) -> None:
    pipeline = _Pipeline(4, overlap=overlap)
    pipeline.add("a")
    pipeline.steps(1)
    assert pipeline.steps(10) == [["a"]] * 10
    assert pipeline.most_in_flight == most


def test_empty_micro_batches_are_passed() -> None:
    pipeline = _Pipeline(4)
    pipeline.add("a", "b")
    pipeline.steps(5)
    steps = pipeline.steps(6)
    assert sorted(steps[:2]) == [["a"], ["b"]]
    assert steps[2:] == steps[:4]


def test_chunks_of_a_prompt_follow_each_other_while_tokens_are_on_their_way() -> None:
    """The second step of a request would keep the chunks behind it waiting for its token."""
    pipeline = _Pipeline(4, chunked_prefill_size=5, max_prefill_tokens=5)
    pipeline.add("a")
    pipeline.steps(3)
    pipeline.add("b", prompt=40)

    pipeline.steps(8)

    assert [prompts(plan) for plan in pipeline.plans[3:]] == [[("b", 5 * i, 5)] for i in range(8)]
    own = [index for index, plan in enumerate(pipeline.plans) if "a" in decoded(plan)]
    assert own == [1, 2, 6, 10]


def test_chunks_need_no_commit_between() -> None:
    scheduler = make_scheduler(capacity=make_capacity(num_stages=4), chunked_prefill_size=5)
    scheduler.add(make_request("a", 20, max_tokens=4))
    scheduler.add(make_request("b", 5, max_tokens=4))
    assert [prompts(planned(scheduler)) for _ in range(5)] == [*([("a", 5 * i, 5)] for i in range(4)), [("b", 0, 5)]]


def test_a_micro_batch_waits_for_its_commits() -> None:
    scheduler = make_scheduler(capacity=make_capacity(num_stages=4))
    scheduler.add(make_request("a"))
    first = planned(scheduler)
    assert decoded(planned(scheduler)) == ["a"]
    assert scheduler.plan() is None
    scheduler.commit(first, answer(first))
    assert decoded(planned(scheduler)) == ["a"]


def test_sizes_are_evened_out_when_requests_end() -> None:
    pipeline = _Pipeline(4, num_slots=16)
    names = [f"r{i}" for i in range(16)]
    pipeline.add(*names)
    steps = pipeline.steps(12)[-4:]
    assert [len(step) for step in steps] == [4] * 4
    pipeline.loop.abort(steps[0] + steps[1][:2])
    before = len(pipeline.plans)

    pipeline.steps(12)

    later = [decoded(plan) for plan in pipeline.plans[before:]]
    assert sorted(map(len, later[-4:])) == [2, 2, 3, 3]
    assert sorted(itertools.chain(*later[-4:])) == sorted(set(names) - set(steps[0]) - set(steps[1][:2]))
    for name in later[-1]:  # one that moves never comes sooner than before
        own = [index for index, step in enumerate(steps + later) if name in step]
        assert all(4 <= after - first <= 7 for first, after in itertools.pairwise(own)), own


def test_a_request_that_moves_takes_its_steps_in_flight_with_it() -> None:
    scheduler = make_scheduler(capacity=make_capacity(num_stages=4))
    scheduler.add(make_request("a"))
    scheduler.add(make_request("b"))
    plans = [planned(scheduler) for _ in range(3)]
    assert list(map(decoded, plans)) == [[], ["a"], ["b"]]
    scheduler.abort("a")
    assert scheduler.plan() is None
    scheduler.commit(plans[0], answer(plans[0]))
    assert decoded(planned(scheduler)) == ["b"]


def test_prompts_don_t_wait_for_a_request_that_has_moved() -> None:
    scheduler = make_scheduler(capacity=make_capacity(num_stages=4))
    scheduler.add(make_request("a"))
    scheduler.add(make_request("b"))
    assert [decoded(planned(scheduler)) for _ in range(2)] == [[], ["a"]]
    scheduler.add(make_request("c"))
    plan = planned(scheduler)
    assert (decoded(plan), [name for name, _, _ in prompts(plan)]) == ([], ["c"])


def test_a_step_with_a_prompt_passes_all_stages_within_its_limit() -> None:
    """A stage takes 1 ms for a token."""
    now = 0.0
    capacity = make_capacity(num_pages=400, max_model_len=400, token_buckets=(16, 64, 128, 256), num_stages=4)
    sizes = dict.fromkeys(("chunked_prefill_size", "max_prefill_tokens", "max_num_batched_tokens"), 256)
    scheduler = make_scheduler(capacity=capacity, **sizes, mixed_step_seconds=0.28, clock=lambda: now)
    scheduler.add(make_request("a", 300, max_tokens=60))
    tokens = []
    for number in range(12):
        if number == 2:
            scheduler.add(make_request("b", 300, max_tokens=1))
        plan = planned(scheduler)
        tokens.append(plan.max_rank_tokens(1))
        now += min(size for size in capacity.token_buckets if size >= tokens[-1]) / 1000
        scheduler.commit(plan, answer(plan))
    assert tokens == [256, 44, 64, 64, 64, 64, 45, 1, 1, 1, 1, 1]


class _LongDrafts(Speculation):
    """Verifies drafts of 4 tokens."""

    def choose(self, ranks: Sequence[Sequence[DraftedRequest]]) -> list[int]:
        return [4] * 16


def test_drafts_leave_pages_to_the_other_micro_batches() -> None:
    capacity = make_capacity(num_pages=6, num_stages=2, max_drafts=4, verify_buckets=(20,))
    scheduler = make_scheduler(capacity=capacity, speculation=_LongDrafts(capacity))
    for name in "ab":
        scheduler.add(make_request(name, 6))
    assert prompts(planned(scheduler)) == [("a", 0, 6), ("b", 0, 6)]
    plan = planned(scheduler)
    # Each of the two pages left may be needed by one of them; without drafts, a page has room for one more token
    assert [(chunk.request_id, chunk.length) for chunk in plan.chunks] == [("a", 2)]


def test_ranks_step_together() -> None:
    pipeline = _Pipeline(2, num_ranks=2)
    pipeline.add(*(f"r{i}" for i in range(12)))
    pipeline.steps(6)
    for plan in pipeline.plans[-4:]:
        assert Counter(chunk.rank for chunk in plan.chunks) == {0: 3, 1: 3}


def test_the_ratio_falls_as_with_one_stage() -> None:
    ratios = []
    for num_stages in (1, 4):
        pipeline = _Pipeline(num_stages, conservativeness=1.0)
        pipeline.add(*(f"r{i}" for i in range(8)))
        pipeline.steps(1)
        before = pipeline.scheduler.stats().new_token_ratio
        while Counter(itertools.chain(*map(decoded, pipeline.plans)))["r0"] < 20:
            pipeline.steps(1)
        ratios.append(before - pipeline.scheduler.stats().new_token_ratio)
    assert ratios[1] == pytest.approx(ratios[0], rel=0.1)
    assert ratios[0] > 0


def _order_of_starts_and_retractions(num_stages: int, requests: list[EngineRequest]) -> tuple[list[str], list[str]]:
    """Return the requests in the order in which they started, retracted ones again, and in which they were retracted.

    All pages are needed before any request ends, so that neither depends on the number of stages.
    """
    capacity = make_capacity(
        num_slots=8, num_pages=24, decode_buckets=(8,), prompt_logprob_tokens=9, num_stages=num_stages
    )
    scheduler = make_scheduler(capacity=capacity, max_num_batched_tokens=64, prefix_cache=False)
    retracted: list[str] = []
    retract = scheduler._table.retract

    def record(request: Any) -> None:
        retracted.append(request.request_id)
        retract(request)

    scheduler._table.retract = record  # type: ignore[method-assign]
    executor = FakeExecutor(capacity)
    loop = EngineLoop(scheduler, executor)
    for request in requests:
        assert loop.add(request) is None
    events: list[TokenEvent] = []
    while loop.has_work:
        events += loop.step()
        assert scheduler.check_integrity() == []
    for request in requests:
        tokens = [token for event in events if event.request_id == request.request_id for token in event.token_ids]
        assert tokens == run_alone(request, capacity.max_model_len).token_ids
    names = {tuple(request.prompt_ids): request.request_id for request in requests}
    starts = [names[tuple(opened.prompt_ids)] for plan in executor.plans for opened in plan.opens]
    return starts, retracted


def test_admission_and_retraction_keep_their_order(caplog: pytest.LogCaptureFixture) -> None:
    requests = [make_request(f"r{i}", 8, max_tokens=30) for i in range(8)]
    with caplog.at_level(logging.CRITICAL, "jaxserve.engine"):
        starts, retracted = _order_of_starts_and_retractions(1, requests)
        assert len(retracted) > 3
        for num_stages in (2, 4):
            assert _order_of_starts_and_retractions(num_stages, requests) == (starts, retracted)
