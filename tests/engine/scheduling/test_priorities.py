"""What priorities mean to the queue, to preemption and to retraction, whichever numbers come first."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from jaxserve.api_types import EngineRequest, SamplingParams
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.scheduling.encoder_scheduler import EncoderScheduler
from jaxserve.engine.scheduling.priorities import Priorities
from jaxserve.engine.scheduling.scheduler import Scheduler
from tests.engine.conftest import make_capacity, make_request
from tests.engine.fake_executor import FakeExecutor

ONE_SLOT = {"num_slots": 1, "decode_buckets": (1,)}


def scheduler_of(capacity: dict[str, Any], **options: Any) -> Scheduler:
    sizes = {
        "chunked_prefill_size": 32,
        "max_prefill_tokens": 64,
        "max_num_batched_tokens": 64,
        "conservativeness": 0.0,
    }
    return Scheduler(make_capacity(**capacity), **sizes | options)


def ends(scheduler: Scheduler, first: list[EngineRequest], then: EngineRequest | None = None) -> list[str]:
    """Run requests, of which one comes after a few steps; return their ids in the order in which they end."""
    loop = EngineLoop(scheduler, FakeExecutor(scheduler._capacity))
    for request in first:
        assert loop.add(request) is None
    events = [event for _ in range(4) for event in loop.step()]
    if then is not None:
        assert loop.add(then) is None
    while loop.has_work:
        events += loop.step()
        assert scheduler.check_integrity() == []
    return [event.request_id for event in events if event.finish_reason is not None]


def with_priorities(*priorities: int | None) -> list[EngineRequest]:
    return [make_request(str(i), 4, max_tokens=9, priority=one) for i, one in enumerate(priorities)]


@pytest.mark.parametrize(
    ("priorities", "order"),
    [
        (Priorities(), "2031"),
        (Priorities(low_first=True), "1032"),
        (Priorities(default=7), "0231"),
        (Priorities(default=7, low_first=True), "1320"),
        (Priorities(default=-7, low_first=True), "0132"),
    ],
)
def test_the_queue(priorities: Priorities, order: str) -> None:
    scheduler = scheduler_of(ONE_SLOT, policy="priority", priorities=priorities)
    assert "".join(ends(scheduler, with_priorities(None, -1, 3, 0))) == order


@pytest.mark.parametrize("low_first", [False, True])
def test_the_queue_of_a_bidirectional_model(low_first: bool) -> None:
    capacity = make_capacity(num_slots=1, num_pages=0, generates=False, encodes=True, pooled_size=1)
    priorities = Priorities(default=2, low_first=low_first)
    scheduler = EncoderScheduler(capacity, step_tokens=64, policy="priority", priorities=priorities)
    for i, priority in enumerate((1, None, 3)):
        sampling = SamplingParams(max_tokens=0)
        request = EngineRequest(request_id=str(i), prompt_ids=[1], sampling=sampling, pooled=True, priority=priority)
        assert scheduler.add(request) is None
    order = [chunk.request_id for _ in range(3) if (plan := scheduler.plan()) for chunk in plan.chunks]
    assert order == (["0", "1", "2"] if low_first else ["2", "1", "0"])


@pytest.mark.parametrize(
    ("priorities", "later", "preempts"),
    [
        (Priorities(), 1, True),
        (Priorities(), 0, False),
        (Priorities(threshold=3), 3, False),
        (Priorities(threshold=3), 4, True),
        (Priorities(threshold=None), 2**31 - 1, False),
        (Priorities(low_first=True), 1, False),
        (Priorities(low_first=True), -1, True),
        (Priorities(low_first=True, threshold=3), -3, False),
        (Priorities(low_first=True, threshold=3), -4, True),
    ],
)
def test_preemption(priorities: Priorities, later: int, preempts: bool, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = scheduler_of(ONE_SLOT, policy="priority", priorities=priorities)
    first, then = make_request("first", 4, max_tokens=20), make_request("then", 4, max_tokens=2, priority=later)
    with caplog.at_level(logging.INFO, "jaxserve.engine"):
        assert ends(scheduler, [first], then) == (["then", "first"] if preempts else ["first", "then"])
    assert scheduler.stats().num_preemptions == preempts
    assert (f"preempted 1 running requests for one of priority {later}," in caplog.text) == preempts


def test_no_request_is_preempted_where_only_retraction_goes_by_priority() -> None:
    scheduler = scheduler_of(ONE_SLOT, retraction_policy="priority")
    first, then = make_request("first", 4, max_tokens=20), make_request("then", 4, max_tokens=2, priority=1)
    assert ends(scheduler, [first], then) == ["first", "then"]


@pytest.mark.parametrize(
    ("options", "retracted"),
    [
        ({}, "new"),
        ({"retraction_policy": "priority"}, "old"),
        ({"retraction_policy": "priority", "priorities": Priorities(low_first=True)}, "new"),
        ({"policy": "priority"}, "old"),
        ({"policy": "priority", "priorities": Priorities(threshold=None)}, "old"),
    ],
)
def test_retraction_for_lack_of_pages(options: dict[str, Any], retracted: str) -> None:
    scheduler = scheduler_of({"num_slots": 2, "num_pages": 9, "decode_buckets": (2,)}, **options)
    executor = FakeExecutor(scheduler._capacity)
    loop = EngineLoop(scheduler, executor)
    loop.add(old := make_request("old", 4, max_tokens=30, priority=0))
    for _ in range(4):
        loop.step()
    loop.add(new := make_request("new", 4, max_tokens=30, priority=1))
    while loop.has_work:
        loop.step()
        assert scheduler.check_integrity() == []
    opened = [opened.prompt_ids for plan in executor.plans for opened in plan.opens]
    assert opened[:2] == [old.prompt_ids, new.prompt_ids]
    assert opened[2] == {"old": old, "new": new}[retracted].prompt_ids


def test_the_settings() -> None:
    assert Priorities.of(EngineConfig()) == Priorities()
    config = EngineConfig(
        schedule_policy="priority",
        default_priority_value=5,
        schedule_low_priority_values_first=True,
        priority_scheduling_preemption_threshold=2,
    )
    assert Priorities.of(config) == Priorities(5, True, 2)
    kept = msgspec.structs.replace(config, disable_priority_preemption=True, priority_scheduling_preemption_threshold=0)
    assert Priorities.of(kept) == Priorities(5, True, None)
