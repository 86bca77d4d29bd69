"""The scheduler of bidirectional models: the order of texts, the sizes of steps, and one last event for each text."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from jaxserve.api_types import EngineRequest, FinishReason, SamplingParams, TokenEvent
from jaxserve.engine.scheduling.admission import QueueLimits
from jaxserve.engine.scheduling.encoder_scheduler import EncoderScheduler
from jaxserve.engine.scheduling.text_queue import LONG_WAIT
from jaxserve.step_plan import Capacity, StepPlan, StepResult


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(ranks: int = 1, texts: int = 16, tokens: int = 64, **options: object) -> EncoderScheduler:
    capacity = Capacity(
        num_slots=texts,
        num_pages=0,
        page_size=16,
        max_model_len=256,
        decode_buckets=(),
        token_buckets=(16, 32, 64, 128, 256),
        prompt_logprob_tokens=0,
        num_ranks=ranks,
        pooled_size=4,
        generates=False,
        encodes=True,
    )
    return EncoderScheduler(capacity, step_tokens=tokens, **options)  # type: ignore[arg-type]


def text(name: str, length: int, **fields: object) -> EngineRequest:
    sampling = SamplingParams(max_tokens=0)
    return EngineRequest(request_id=name, prompt_ids=[7] * length, sampling=sampling, pooled=True, **fields)  # type: ignore[arg-type]


def names(plan: StepPlan | None) -> list[str]:
    return [] if plan is None else [chunk.request_id for chunk in plan.chunks]


def commit(scheduler: EncoderScheduler, plan: StepPlan) -> list[TokenEvent]:
    pooled = {i: chunk.request_id.encode() for i, chunk in enumerate(plan.chunks)}
    return scheduler.commit(plan, StepResult(tokens=[[]] * len(pooled), logprobs={}, prompt_logprobs={}, pooled=pooled))


def steps(scheduler: EncoderScheduler) -> list[list[str]]:
    """Run all steps and return the texts of each."""
    found = []
    while (plan := scheduler.plan()) is not None:
        found.append(names(plan))
        commit(scheduler, plan)
    return found


def test_short_texts_come_first_and_steps_are_filled() -> None:
    scheduler = make()
    for name, length in (("a", 60), ("b", 30), ("c", 10), ("d", 20), ("e", 4)):
        scheduler.add(text(name, length))
    assert steps(scheduler) == [["e", "c", "d", "b"], ["a"]]


def test_a_query_overtakes_a_list_of_texts_as_short() -> None:
    scheduler = make()
    for i in range(20):
        scheduler.add(text(f"list-{i}", 10, group_id="list", sample=i))
    scheduler.add(text("query", 12))
    assert names(scheduler.plan())[:3] == ["list-0", "query", "list-1"]


def test_half_of_a_step_is_for_those_that_have_waited_long() -> None:
    clock = Clock()
    scheduler = make(clock=clock)
    scheduler.add(text("long-1", 30))
    scheduler.add(text("long-2", 30))
    scheduler.add(text("long-3", 30))
    for i in range(20):
        scheduler.add(text(f"short-{i}", 8))
    assert names(scheduler.plan()) == [f"short-{i}" for i in range(8)]
    clock.now = LONG_WAIT
    assert names(scheduler.plan()) == ["long-1", "long-2"]
    assert names(scheduler.plan()) == ["long-3", *(f"short-{i}" for i in range(8, 12))]


def test_a_text_longer_than_a_step_has_one_for_itself() -> None:
    scheduler = make()
    scheduler.add(text("whole", 256))
    scheduler.add(text("short", 3))
    assert steps(scheduler) == [["short"], ["whole"]]


def test_a_text_that_does_not_fit_lets_shorter_ones_of_a_list_pass() -> None:
    scheduler = make()
    scheduler.add(text("a", 40))
    scheduler.add(text("b", 41))
    for i in range(3):
        scheduler.add(text(f"list-{i}", 20, group_id="list", sample=i))
    assert steps(scheduler) == [["list-0", "a"], ["list-1", "b"], ["list-2"]]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("fcfs", ["c", "b", "a"]), ("priority", ["a", "c", "b"]), ("shortest-prefill-first", ["b", "a", "c"])],
)
def test_policies(policy: str, expected: list[str]) -> None:
    scheduler = make(policy=policy)
    for name, length, priority in (("c", 30, 1), ("b", 10, 0), ("a", 20, 2)):
        scheduler.add(text(name, length, priority=priority))
    assert names(scheduler.plan()) == expected


def test_ranks_share_the_tokens() -> None:
    scheduler = make(ranks=2)
    for i in range(6):
        scheduler.add(text(str(i), 20 + i))
    plan = scheduler.plan()
    assert plan is not None
    tokens = Counter({0: 0, 1: 0})
    for chunk in plan.chunks:
        tokens[chunk.rank] += chunk.length
    assert sorted(tokens.values()) == [20 + 22, 21 + 23], tokens


def test_rows_are_limited() -> None:
    scheduler = make(texts=3)
    for i in range(5):
        scheduler.add(text(str(i), 1))
    assert steps(scheduler) == [["0", "1", "2"], ["3", "4"]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_texts_of_a_step_are_limited(ranks: int) -> None:
    scheduler = make(ranks=ranks, prefill_max_requests=2)
    for i in range(5):
        scheduler.add(text(str(i), 1))
    assert [len(step) for step in steps(scheduler)] == ([2, 2, 1] if ranks == 1 else [4, 1])


def test_an_aborted_text_ends_once_wherever_it_is() -> None:
    scheduler = make()
    scheduler.add(text("a", 60))
    scheduler.add(text("b", 50))
    plan = scheduler.plan()
    assert plan is not None
    for name in ("a", "b"):
        event = scheduler.abort(name)
        assert event is not None
        assert (event.request_id, event.finish_reason) == (name, FinishReason.ABORT)
    assert not scheduler.has_work
    scheduler.add(text("b", 2))  # another one of the same name
    assert commit(scheduler, plan) == []
    assert steps(scheduler) == [["b"]]
    assert scheduler.abort("b") is None


def test_refusals() -> None:
    scheduler = make(texts=1, limits=QueueLimits(max_queued_requests=1))
    assert scheduler.add(text("a", 10)) is None
    for request, words in (
        (text("a", 10), "already open"),
        (text("b", 0), "is empty"),
        (text("c", 257), "more than the context length of 256"),
        (EngineRequest(request_id="d", prompt_ids=[1], sampling=SamplingParams()), "generates no tokens"),
    ):
        event = scheduler.add(request)
        assert event is not None
        assert event.finish_reason is FinishReason.ERROR
        assert words in (event.error or "")
    assert scheduler.add(text("e", 10)) is None
    event = scheduler.add(text("f", 10))
    assert event is not None
    assert "--max-queued-requests is 1" in (event.error or "")


def test_every_text_has_exactly_one_last_event_within_the_sizes_of_programs() -> None:
    random_ = random.Random(3)
    clock = Clock()
    scheduler = make(ranks=2, texts=8, clock=clock)
    ended: Counter[str] = Counter()
    flight: list[StepPlan] = []
    total = 0
    for _ in range(600):
        clock.now += random_.random() * 0.05
        for _ in range(random_.randrange(4)):
            length = random_.choice((1, 5, 20, 64, 65, 256))
            assert scheduler.add(text(str(total), length, group_id=random_.choice(("", "x", "y")))) is None
            total += 1
        if random_.random() < 0.2 and (event := scheduler.abort(str(random_.randrange(total + 1)))):
            ended[event.request_id] += 1
        if (plan := scheduler.plan()) is not None:
            flight.append(plan)
            for rank in range(2):
                lengths = [chunk.length for chunk in plan.chunks if chunk.rank == rank]
                assert len(lengths) <= 8
                assert sum(lengths) <= 64 or len(lengths) == 1
        if len(flight) > 1 or (flight and plan is None):
            ended.update(event.request_id for event in commit(scheduler, flight.pop(0)))
        assert scheduler.check_integrity() == []
    while flight or scheduler.has_work:
        if (plan := scheduler.plan()) is not None:
            flight.append(plan)
        ended.update(event.request_id for event in commit(scheduler, flight.pop(0)))
    assert ended == Counter(map(str, range(total)))
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_queued_tokens) == (0, 0, 0)
    assert stats.num_finished == total
    assert stats.mixed_tokens == stats.prefill_tokens <= stats.mixed_bucket_tokens
