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
    """The times of one stage. A thread waits for its steps; `on_failure` gets the reason if one fails."""

    def __init__(self, name: str, on_failure: Callable[[str], None] | None = None) -> None:
        self._planned: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[tuple[float, Any, Any]] = queue.SimpleQueue()
        self._on_failure = on_failure
        self._times = StageTimes()
        threading.Thread(target=self._watch, name=f"jaxserve-{name}", daemon=True).start()

    @property
    def times(self) -> StageTimes:
        """The times so far."""
        return self._times

    def plan(self) -> None:
        """Note that a step is planned: from now on, the stage waits for it."""
        self._planned.put(time.monotonic())

    def watch(self, given: Any, output: Any) -> None:
        """Note that the stage has started the oldest planned step; `given` is its input, which may come later."""
        self._started.put((time.monotonic(), given, output))

    def _watch(self) -> None:
        free = 0.0  # since when the stage computes nothing
        while True:
            started, given, output = self._started.get()
            planned = self._planned.get()
            try:
                begin = max(free, started, _arrival(given))
                jax.block_until_ready(output)
            except Exception as error:  # a program may raise anything
                if self._on_failure is not None:
                    self._on_failure(f"a step failed: {type(error).__name__}: {error}")
                return
            end = time.monotonic()
            before = self._times
            self._times = StageTimes(
                before.compute_seconds + end - begin,
                before.wait_seconds + max(0.0, begin - max(free, planned)),
            )
            free = end


def _arrival(given: Any) -> float:
    """Wait for the input of a step, and return when it came; 0 if it was there before."""
    if all(array.is_ready() for array in jax.tree.leaves(given)):
        return 0.0
    jax.block_until_ready(given)
    return time.monotonic()
