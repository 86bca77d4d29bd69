from __future__ import annotations

import gc
import threading

import pytest

from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.process import follower
from jaxserve.engine.process.main import _CommandServer
from jaxserve.engine.process.transport import Add, Command
from jaxserve.engine.process.watchdog import SoftWatchdog
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.errors import EngineDeadError
from jaxserve.step_plan import StepResult
from tests.engine.conftest import make_capacity, make_request
from tests.engine.fake_executor import FakeExecutor


def test_a_missing_step_is_logged_once_and_again_only_after_progress(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    watchdog = SoftWatchdog(10.0, clock=lambda: now)

    def reports(at: float) -> int:
        nonlocal now
        now = at
        before = len(caplog.records)
        watchdog.check()
        return len(caplog.records) - before

    watchdog.note(0, has_work=False)
    assert not reports(100.0), "nothing is open"
    watchdog.note(0, has_work=True)
    assert not reports(110.0)
    watchdog.note(0, has_work=True)
    assert [reports(at) for at in (110.1, 110.2, 500.0)] == [1, 0, 0]
    watchdog.note(1, has_work=True)
    assert [reports(at) for at in (510.0, 510.1, 600.0)] == [0, 1, 0]
    watchdog.note(2, has_work=True)
    watchdog.note(2, has_work=False)
    assert not reports(900.0)


class _StuckExecutor(FakeExecutor):
    """Its steps end when it is released."""

    def __init__(self) -> None:
        super().__init__(make_capacity())
        self.is_stuck, self.released = threading.Event(), threading.Event()

    def collect(self, handle: object) -> StepResult:
        self.is_stuck.set()
        assert self.released.wait(60)
        return super().collect(handle)


class _Transport:
    """Has one request, then the end; messages to the client are dropped."""

    num_clients = 1

    def __init__(self) -> None:
        self._turns: list[list[Command] | None] = [[Add([make_request("a", max_tokens=2)])], None]

    def receive(self, *, wait: bool, timeout: float | None = None) -> list[Command] | None:
        return self._turns.pop(0) if wait else []

    def send(self, client: int, message: object) -> None:
        pass


def test_a_step_that_hangs_shows_where(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    executor, watchdog = _StuckExecutor(), SoftWatchdog(10.0, clock=lambda: now)
    scheduler = Scheduler(make_capacity(), chunked_prefill_size=32, max_prefill_tokens=32, max_num_batched_tokens=64)
    loop = EngineLoop(scheduler, executor, overlap=False)
    server = _CommandServer(loop, _Transport(), watchdog=watchdog)  # type: ignore[arg-type]
    engine = threading.Thread(target=server.run, name="the-engine")
    engine.start()
    assert executor.is_stuck.wait(60)
    now = 10.1
    watchdog.check()
    [record] = caplog.records
    [stuck] = [stack for stack in record.getMessage().split("Thread ") if stack.startswith("the-engine:\n")]
    assert "self.released.wait(60)" in stuck
    executor.released.set()
    engine.join()
    now = 1000.0
    watchdog.check()
    assert caplog.records == [record], "an idle engine expects no step"


def test_a_follower_expects_the_end_of_each_command(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    watchdog = SoftWatchdog(10.0, clock=lambda: now)
    commands = iter([b"fast", b"slow", b"end"])

    class _Group:
        def next_command(self) -> bytes:
            nonlocal now
            now += 100.0  # nothing to do
            watchdog.check()
            return next(commands)

    def execute(command: bytes) -> None:
        nonlocal now
        if command == b"end":
            raise EngineDeadError("the end")
        now += 1.0 if command == b"fast" else 11.0
        watchdog.check()
        watchdog.check()
        assert len(caplog.records) == (command == b"slow")

    monkeypatch.setattr(follower, "_leave_with_parent", lambda group, parent_pipe: None)
    with pytest.raises(EngineDeadError):
        follower.execute_commands(_Group(), execute, -1, watchdog)  # type: ignore[arg-type]
    gc.unfreeze()
