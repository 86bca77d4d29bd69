"""Computes recent tokens per second from readings of counters that only grow. Reads no clock itself."""

from __future__ import annotations

from collections import deque

from jaxserve.api_types import EngineStats

WINDOW = 10.0
"""The seconds that a rate spans."""


class Throughput:
    """The rates over the last `WINDOW` seconds. Needs a reading at least once a second."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, EngineStats]] = deque()

    def record(self, now: float, stats: EngineStats) -> None:
        """Add a reading at the time `now`, in seconds."""
        readings = self._readings
        readings.append((now, stats))
        while len(readings) > 2 and readings[1][0] <= now - WINDOW:
            readings.popleft()

    def prompt(self) -> float:
        """Return the prompt tokens per second, cached ones included."""
        return self._rate("prompt_tokens")

    def generation(self) -> float:
        """Return the generated tokens per second."""
        return self._rate("generation_tokens")

    def _rate(self, counter: str) -> float:
        if len(self._readings) < 2:
            return 0.0
        (before, old), (now, new) = self._readings[0], self._readings[-1]
        change: int = getattr(new, counter) - getattr(old, counter)
        return change / (now - before) if now > before else 0.0
