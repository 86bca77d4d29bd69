from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from jaxserve.api_types import EngineStats, StageTimes
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.core.step_log import StepLog
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.errors import EngineDeadError
from jaxserve.step_plan import StepPlan, StepResult
from tests.engine.conftest import make_capacity, make_request
from tests.engine.fake_executor import FakeExecutor


class _Recording(FakeExecutor):
    def __init__(self) -> None:
        super().__init__(make_capacity())
        self.calls: list[str] = []

    def dispatch(self, plan: StepPlan) -> Any:
        self.calls.append("dispatch")
        return super().dispatch(plan)

    def collect(self, handle: object) -> StepResult:
        self.calls.append("collect")
        return super().collect(handle)


def _loop(executor: FakeExecutor, **options: Any) -> EngineLoop:
    scheduler = Scheduler(executor.capacity, chunked_prefill_size=32, max_prefill_tokens=32, max_num_batched_tokens=64)
    return EngineLoop(scheduler, executor, **options)


@pytest.mark.parametrize(
    ("overlap", "calls"),
    [
        (True, ["dispatch", "dispatch", "collect", "dispatch", "collect", "collect"]),
        (False, ["dispatch", "collect"] * 3),
    ],
)
def test_one_step_is_in_flight_while_the_next_is_planned(overlap: bool, calls: list[str]) -> None:
    executor = _Recording()
    loop = _loop(executor, overlap=overlap)
    loop.add(make_request("a", max_tokens=3))
    while loop.has_work:
        loop.step()
    assert executor.calls == calls


def test_flush_commits_the_steps_in_flight() -> None:
    executor = _Recording()
    loop = _loop(executor)
    loop.add(make_request("a", max_tokens=3))
    assert loop.step() == []
    assert len(loop.flush()) == 1
    assert executor.calls == ["dispatch", "collect"]
    assert loop.flush() == []


@pytest.mark.parametrize("method", ["dispatch", "collect"])
def test_a_failing_device_ends_the_loop(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = _Recording()

    def fail(_: object) -> StepResult:
        monkeypatch.undo()
        raise MemoryError("no more")

    monkeypatch.setattr(executor, method, fail)
    loop = _loop(executor, overlap=False)
    loop.add(make_request("a"))
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="a step failed: MemoryError: no more"):
            loop.step()


def test_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    executor = _Recording()
    loop = _loop(executor, overlap=False, decode_log_interval=4)
    now = iter(range(100))
    loop._log = StepLog(loop._scheduler, 4, clock=lambda: float(next(now)))
    loop.add(make_request("a", 6, max_tokens=6))
    loop.add(make_request("b", 5, max_tokens=6))
    with caplog.at_level(logging.INFO, "jaxserve.engine"):
        while loop.has_work:
            loop.step()
    assert caplog.messages == [
        "Prefill batch. #new-seq: 2, #new-token: 11, #cached-token: 0, token usage: 0.06, #running-req: 2, "
        "#queue-req: 0, cache hit rate: 0.00%",
        "Decode batch. #running-req: 2, #token: 24, token usage: 0.09, gen throughput (token/s): 8.00, #queue-req: 0, "
        "cuda graph: True, bucket: 2, padding: 0.00%",
    ]


class _Speculating(Scheduler):
    """A scheduler whose every decode step verifies a draft of 2 tokens, of which 1 is accepted."""

    def stats(self) -> EngineStats:
        stats = super().stats()
        drafts = stats.decode_steps
        return msgspec.structs.replace(
            stats, num_drafts=drafts, draft_tokens=2 * drafts, accepted_tokens=drafts, accepted_by_position=(drafts, 0)
        )


def test_the_decode_line_shows_the_acceptance_of_its_steps(caplog: pytest.LogCaptureFixture) -> None:
    executor = FakeExecutor(make_capacity())
    scheduler = _Speculating(
        executor.capacity, chunked_prefill_size=32, max_prefill_tokens=32, max_num_batched_tokens=64
    )
    loop = EngineLoop(scheduler, executor, decode_log_interval=4)
    loop.add(make_request("a", max_tokens=12))
    with caplog.at_level(logging.INFO, "jaxserve.engine"):
        while loop.has_work:
            loop.step()
    lines = [message for message in caplog.messages if message.startswith("Decode")]
    assert len(lines) == 2
    assert all("accept len: 2.00, accept rate: 0.50, gen throughput" in line for line in lines)


class _Staged(_Recording):
    """An executor of 2 stages, which waited 100 s at first; a step takes the first one 3 of 4 s, the other 2 of 4 s."""

    def stage_times(self) -> tuple[StageTimes, ...]:
        steps = float(self.calls.count("dispatch"))
        return StageTimes(3 * steps, 100 + steps), StageTimes(2 * steps, 100 + 2 * steps)


def test_the_decode_line_shows_how_busy_stages_were_in_its_steps(caplog: pytest.LogCaptureFixture) -> None:
    executor = _Staged()
    loop = _loop(executor, overlap=False, decode_log_interval=4)
    loop.add(make_request("a", max_tokens=12))
    with caplog.at_level(logging.INFO, "jaxserve.engine"):
        while loop.has_work:
            loop.step()
    lines = [message for message in caplog.messages if message.startswith("Decode")]
    assert len(lines) == 2
    assert all(line.endswith(", stages busy: 75%/50%") for line in lines)
    assert loop.stats().stages == executor.stage_times()


def test_idle_time_is_not_counted_into_the_throughput(caplog: pytest.LogCaptureFixture) -> None:
    executor = _Recording()
    loop = _loop(executor, overlap=False, decode_log_interval=4)
    now = 0.0
    loop._log = StepLog(loop._scheduler, 4, clock=lambda: now)
    with caplog.at_level(logging.INFO, "jaxserve.engine"):
        for name in "ab":
            loop.add(make_request(name, max_tokens=5))
            while loop.has_work:
                loop.step()
                now += 1.0
            now += 1000.0
    throughputs = [message for message in caplog.messages if message.startswith("Decode")]
    assert len(throughputs) == 2
    assert all("(token/s): 1.00," in line for line in throughputs)


def test_stats_include_compiles_of_the_device() -> None:
    executor = _Recording()
    executor.compiles_after_ready = 3
    assert _loop(executor).stats().compiles_after_ready == 3
