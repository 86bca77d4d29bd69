"""The costs of steps: recent durations of the programs that ran them."""

from __future__ import annotations

import statistics
from collections import deque

# The median of this many last durations counts, so that a step that was held up does not.
_REMEMBERED = 5

# Whenever a program has not run for this many steps, its hoped time is multiplied by `_STALE_BONUS`, so that one slow
# measurement does not rule it out for good.
STALE_STEPS = 200
_STALE_BONUS = 0.8

# A step of up to this many tokens is assumed to take as long as a decode step, until it is measured.
FREE_TOKENS = 8


class StepCosts:
    """The seconds that a step of each program takes, `key` being any name of a program."""

    def __init__(self) -> None:
        self._recent: dict[object, deque[float]] = {}
        self._medians: dict[object, float] = {}
        self._measured_at: dict[object, int] = {}
        self._num_steps = 0

    def add(self, key: object, seconds: float) -> None:
        """Add the duration of a step."""
        self._num_steps += 1
        recent = self._recent.setdefault(key, deque(maxlen=_REMEMBERED))
        recent.append(seconds)
        self._medians[key] = statistics.median_low(recent)
        self._measured_at[key] = self._num_steps

    def of(self, key: object) -> float | None:
        """Return the seconds of a step, or None if none was measured."""
        return self._medians.get(key)

    def hoped(self, key: object) -> float | None:
        """Return the seconds of a step, less if it was measured long ago, or None if it never was."""
        seconds = self._medians.get(key)
        return None if seconds is None else seconds * _STALE_BONUS ** (self.age(key) // STALE_STEPS)

    def age(self, key: object) -> int:
        """Return how many steps ago the program was measured last."""
        return self._num_steps - self._measured_at.get(key, 0)
