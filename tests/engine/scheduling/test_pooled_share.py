"""Pooled requests beside chats: they get their share of the time, and chats don't wait behind them."""

from __future__ import annotations

import msgspec
import pytest

from jaxserve.api_types import EngineRequest, FinishReason
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.scheduling.admission import QueueLimits
from jaxserve.engine.scheduling.policy import Policy
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.errors import QueueFullError
from tests.engine.conftest import make_capacity, make_request
from tests.engine.fake_executor import FakeExecutor

DECODE, TOKEN = 0.010, 0.0005
"""The seconds of a step of decodes, and by what each token of its program lengthens a step with prompts."""


class TimedExecutor(FakeExecutor):
    """A device whose steps take time on a clock of its own."""

    now = 0.0
    pooled_seconds = decode_seconds = 0.0

    def collect(self, handle: object) -> object:  # type: ignore[override]
        plan = self.plans[self._num_collected]
        size = self.capacity.bucket("mixed", plan.size(1)) if plan.kind == "mixed" else 0
        extra = TOKEN * size
        self.now += DECODE + extra
        if plan.num_decodes:
            self.decode_seconds += DECODE
            self.pooled_seconds += extra
        return super().collect(handle)


def make_loop(
    share: float,
    *,
    limits: QueueLimits | None = None,
    policy: Policy = "fcfs",
    prefill_max_requests: int | None = None,
    **options: object,
) -> tuple[EngineLoop, Scheduler, TimedExecutor]:
    capacity = make_capacity(
        num_slots=8, num_pages=1000, page_size=4, max_model_len=600, decode_buckets=(8,), token_buckets=(16, 64, 256),
        prompt_logprob_tokens=16, pooled_size=1, **options,
    )  # fmt: skip
    executor = TimedExecutor(capacity)
    scheduler = Scheduler(
        capacity, chunked_prefill_size=256, max_prefill_tokens=256, max_num_batched_tokens=256,
        pooled_time_share=share, limits=limits, policy=policy, prefill_max_requests=prefill_max_requests,
        clock=lambda: executor.now,
    )  # fmt: skip
    return EngineLoop(scheduler, executor, overlap=False), scheduler, executor


def pooled(name: str, length: int = 100) -> EngineRequest:
    return msgspec.structs.replace(make_request(name, length, max_tokens=0), pooled=True)


def run_chats(loop: EngineLoop, num_tokens: int) -> dict[str, int]:
    """Let four chats run to their end; return in which step each request ended."""
    for i in range(4):
        assert loop.add(make_request(f"chat{i}", 5 + i, max_tokens=num_tokens)) is None
    ended: dict[str, int] = {}
    step = 0
    while sum(name.startswith("chat") for name in ended) < 4:
        step += 1
        ended |= {event.request_id: step for event in loop.step() if event.finish_reason is not None}
        assert step < 10_000
    return ended


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3])
def test_pooled_requests_take_their_share_of_the_time(share: float) -> None:
    loop, scheduler, executor = make_loop(share)
    for i in range(300):
        assert loop.add(pooled(f"text{i}")) is None
    for _ in range(3):  # chats arrive while pooled requests run
        loop.step()

    ended = run_chats(loop, 500)

    assert executor.pooled_seconds / (executor.pooled_seconds + executor.decode_seconds) == pytest.approx(
        share, abs=0.03
    )
    assert sum(name.startswith("text") for name in ended) > 3
    assert scheduler.check_integrity() == []


def test_without_a_limit_pooled_requests_fill_every_step() -> None:
    loop, _, executor = make_loop(1.0)
    for i in range(300):
        loop.add(pooled(f"text{i}"))
    loop.step()

    run_chats(loop, 60)

    assert executor.pooled_seconds > 2 * executor.decode_seconds


def test_chats_do_not_wait_behind_pooled_requests() -> None:
    loop, scheduler, _ = make_loop(0.1)
    for i in range(300):
        loop.add(pooled(f"text{i}"))

    ended = run_chats(loop, 10)

    assert scheduler.num_waiting > 250
    assert max(step for name, step in ended.items() if name.startswith("chat")) < 30


def test_pooled_requests_alone_fill_the_budget_and_end_with_a_vector() -> None:
    loop, _, executor = make_loop(0.1)
    for i in range(30):
        loop.add(pooled(f"text{i}"))
    events = []
    while loop.has_work:
        events += loop.step()

    assert {event.finish_reason for event in events} == {FinishReason.STOP}
    assert all(event.pooled is not None and event.token_ids == [] for event in events)
    tokens = [plan.size(1) for plan in executor.plans if plan.chunks]
    assert sum(tokens) == 3000
    assert min(tokens[:-1]) == 256


def test_what_an_engine_does_not_do_is_refused() -> None:
    loop, _, _ = make_loop(0.1, generates=False)
    refusal = loop.add(make_request("chat", 5, max_tokens=3))
    assert refusal is not None
    assert refusal.error == "this engine pools and generates no tokens"

    loop, _, _ = make_loop(0.1)
    loop._scheduler._capacity = make_capacity()
    refusal = loop.add(pooled("text"))
    assert refusal is not None
    assert refusal.error == "this engine generates tokens and pools nothing"


def test_a_text_as_long_as_the_context_is_pooled_and_a_longer_one_is_refused() -> None:
    loop, _, _ = make_loop(0.1)
    assert loop.add(pooled("whole", 600)) is None
    refusal = loop.add(pooled("longer", 601))
    assert refusal is not None
    assert "601 tokens, more than the context length of 600" in (refusal.error or "")
    while loop.has_work:
        loop.step()


def test_a_full_queue_takes_all_texts_of_a_list_or_none() -> None:
    loop, _, _ = make_loop(0.1, limits=QueueLimits(max_num_queued_tokens=300))
    lists = [
        [msgspec.structs.replace(pooled(f"{name}{i}"), group_id=name, sample=i) for i in range(20)] for name in "ab"
    ]
    assert [loop.add(one) for one in lists[0]] == [None] * 20
    refusals = [loop.add(one) for one in lists[1]]
    assert all(refusal is not None and QueueFullError.from_text(refusal.error or "") for refusal in refusals)


def test_pooled_requests_go_on_beside_prompts_without_answers_and_these_are_fast() -> None:
    loop, _, _ = make_loop(0.1)
    for i in range(200):
        loop.add(pooled(f"text{i}"))
    for _ in range(3):
        loop.step()
    ended = {"chat": 0, "text": 0}
    for number in range(200):
        for i in range(2):
            loop.add(make_request(f"chat{number}-{i}", 120, max_tokens=1))
        for event in loop.step():
            ended[event.request_id[:4]] += event.finish_reason is not None
    assert ended["chat"] > 300
    assert 10 < ended["text"] < 60, "texts have their share, and no more while chats come"
    while loop.has_work:
        loop.step()


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_one_prompt_a_step_lets_chats_and_pooled_requests_end(share: float) -> None:
    loop, _, executor = make_loop(share, prefill_max_requests=1)
    for i in range(8):
        loop.add(pooled(f"text{i}", 300))
    ended = run_chats(loop, 60)
    while loop.has_work:
        loop.step()
    assert len([name for name in ended if name.startswith("chat")]) == 4
    assert max(sum(chunk.tokens is not None for chunk in plan.chunks) for plan in executor.plans) == 1


def test_pooled_requests_start_by_priority_and_preempt_no_chat() -> None:
    loop, _, _ = make_loop(0.1, policy="priority")
    for i in range(8):  # they have all slots
        loop.add(make_request(f"chat{i}", 5, max_tokens=40))
    loop.step()
    for i in range(12):
        loop.add(msgspec.structs.replace(pooled(f"text{i}", 30), priority=i))
    ended = []
    while loop.has_work:
        ended += [event.request_id for event in loop.step() if event.finish_reason is not None]
    assert [name for name in ended if name.startswith("text")] == [f"text{i}" for i in reversed(range(12))]
    assert loop.stats().num_preemptions == 0
