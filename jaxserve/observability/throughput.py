"""Tokens a second over the last moments, from readings of counters that only grow. Owns the readings; no clock."""

from __future__ import annotations

from collections import deque

from jaxserve.api_types import EngineStats

WINDOW = 10.0
"""Seconds that a rate looks back."""


class Throughput:
    """Readings come at least once a second while it matters; a rate spans the last `WINDOW` of them."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, EngineStats]] = deque()

    def record(self, now: float, stats: EngineStats) -> None:
        """Take a reading of the time `now`, in seconds."""
        readings = self._readings
        readings.append((now, stats))
        while len(readings) > 2 and readings[1][0] <= now - WINDOW:
            readings.popleft()

    def prompt(self) -> float:
        """Prompt tokens a second, cached ones included."""
        return self._rate("prompt_tokens")

    def generation(self) -> float:
        """Generated tokens a second."""
        return self._rate("generation_tokens")

    def _rate(self, counter: str) -> float:
        if len(self._readings) < 2:
            return 0.0
        (before, old), (now, new) = self._readings[0], self._readings[-1]
        change: int = getattr(new, counter) - getattr(old, counter)
        return change / (now - before) if now > before else 0.0
