"""The times of a pipeline stage, of arrays that arrive when the test says so."""

from __future__ import annotations

import queue
import threading

from jaxserve.api_types import StageTimes
from jaxserve.runtime.execution.stage_clock import StageClock


class _Array:
    """An array that is there once `arrive` was called; a failed one raises."""

    def __init__(self, *, failed: bool = False) -> None:
        self._there = threading.Event()
        self._failed = failed
        self.waited_for = threading.Event()

    def arrive(self) -> None:
        self._there.set()

    def is_ready(self) -> bool:
        return self._there.is_set()

    def block_until_ready(self) -> _Array:
        self.waited_for.set()
        assert self._there.wait(60)
        if self._failed:
            raise RuntimeError("out of memory")
        return self


class _Clock:
    """A stage's clock, at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.of_stage = StageClock(0, self.told.put, lambda: self.now)

    def start(self, given: _Array, output: _Array) -> None:
        self.of_stage.plan()
        self.of_stage.watch(given, output)

    def times(self) -> StageTimes:
        """The times of all steps whose outputs have arrived."""
        given = _Array()
        self.start(given, _Array())
        assert given.waited_for.wait(60)
        return self.of_stage.times


def test_a_stage_computes_from_its_input_to_its_output_and_waits_before() -> None:
    clock = _Clock()
    steps = [(_Array(), _Array()) for _ in range(3)]
    for given, output in steps:
        clock.start(given, output)
    (given, output), (second, after), (third, last) = steps
    assert given.waited_for.wait(60)
    clock.now = 1.0
    given.arrive()  # a second after it was planned
    assert output.waited_for.wait(60)
    second.arrive()  # before the stage is free
    clock.now = 4.0
    output.arrive()
    assert after.waited_for.wait(60)
    clock.now = 6.0
    after.arrive()
    assert third.waited_for.wait(60)
    clock.now = 9.0
    third.arrive()
    assert last.waited_for.wait(60)
    clock.now = 10.0
    last.arrive()
    assert clock.times() == StageTimes(3 + 2 + 1, 1 + 0 + 3)


def test_time_without_a_step_is_not_waited() -> None:
    clock = _Clock()
    given, output = _Array(), _Array()
    given.arrive()
    clock.now = 100.0
    clock.start(given, output)
    assert output.waited_for.wait(60)
    clock.now = 101.0
    output.arrive()
    assert clock.times() == StageTimes(1.0, 0.0)


def test_a_failed_step_is_reported() -> None:
    clock = _Clock()
    given, output = _Array(), _Array(failed=True)
    given.arrive()
    output.arrive()
    clock.start(given, output)
    assert clock.told.get(timeout=60) == "a step failed: RuntimeError: out of memory"
