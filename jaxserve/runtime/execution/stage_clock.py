"""Measures how long a pipeline stage computes, and how long it waits for the input of its next step."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxserve.api_types import StageTimes


class StageClock:
    """The times of the stage of this number. A thread waits for its steps; `on_failure` gets the reason if one fails.

    `clock` returns seconds.
    """

    def __init__(
        self, number: int, on_failure: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_failure = on_failure
        self._clock = clock
        self._planned: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[tuple[float, Any, Any]] = queue.SimpleQueue()
        self._times = StageTimes()
        threading.Thread(target=self._watch, name=f"jaxserve-stage-{number}", daemon=True).start()

    @property
    def times(self) -> StageTimes:
        """The times so far."""
        return self._times

    def plan(self) -> None:
        """Note that a step is planned: from now on, the stage waits for it."""
        self._planned.put(self._clock())

    def watch(self, given: Any, output: Any) -> None:
        """Note that the stage has started the oldest planned step; `given` is its input, which may come later."""
        self._started.put((self._clock(), given, output))

    def _watch(self) -> None:
        free = 0.0  # since when the stage computes nothing
        while True:
            started, given, output = self._started.get()
            planned = self._planned.get()
            try:
                begin = max(free, started, self._arrival(given))
                jax.block_until_ready(output)
            except Exception as error:  # a program may raise anything
                self._on_failure(f"a step failed: {type(error).__name__}: {error}")
                return
            end = self._clock()
            before = self._times
            self._times = StageTimes(
                before.compute_seconds + end - begin,
                before.wait_seconds + max(0.0, begin - max(free, planned)),
            )
            free = end

    def _arrival(self, given: Any) -> float:
        """Wait for the input of a step, and return when it came; 0 if it was there before."""
        if all(array.is_ready() for array in jax.tree.leaves(given)):
            return 0.0
        jax.block_until_ready(given)
        return self._clock()
