"""How fast a server makes room: requests that end and prompt tokens that are computed, per second of full load.

It reads counters that only grow, and no clock. Over an interval that was not full, a server does less than it could: an
interval counts for the share of it in which the slots were taken, or prompts waited.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from jaxserve.api_types import EngineStats

WINDOW = 60.0
"""The seconds that are measured."""


class _FullLoad(NamedTuple):
    """The counters at a time, and the seconds of full load before it."""

    at: float
    num_finished: int
    prompt_tokens: int
    decoding_seconds: float
    prefill_seconds: float


class Turnover:
    """The rates over the last `WINDOW` seconds. Needs a reading about once a second."""

    def __init__(self) -> None:
        self._readings: deque[_FullLoad] = deque()

    def record(self, at: float, stats: EngineStats, most_running: int) -> None:
        """Add a reading at a time, in seconds. At most `most_running` requests, at least one, may run."""
        readings = self._readings
        last = readings[-1] if readings else _FullLoad(at, 0, 0, 0.0, 0.0)
        full = 1.0 if stats.num_waiting else min(stats.num_running / most_running, 1.0)
        computed = stats.prefill_tokens + stats.cache_hit_tokens
        prefills = stats.num_queued_tokens > 0
        seconds = at - last.at
        decoding, prefill = last.decoding_seconds + seconds * full, last.prefill_seconds + seconds * prefills
        readings.append(_FullLoad(at, stats.num_finished, computed, decoding, prefill))
        while len(readings) > 2 and readings[1].at <= at - WINDOW:
            readings.popleft()

    def requests(self, capacity: int) -> float:
        """Return how many requests end in a second of full load, if `capacity` are open.

        Until that many have ended, it is as if the last of them ended now, after a second at least: the first to end
        say little about the others.
        """
        return self._rate("num_finished", "decoding_seconds", capacity)

    def prompt_tokens(self, capacity: int) -> float:
        """Return how many prompt tokens are computed or found in the cache in a second, if `capacity` wait."""
        return self._rate("prompt_tokens", "prefill_seconds", capacity)

    def _rate(self, counter: str, busy: str, capacity: int) -> float:
        count, seconds = 0, 0.0
        if self._readings:
            first, last = self._readings[0], self._readings[-1]
            count = getattr(last, counter) - getattr(first, counter)
            seconds = getattr(last, busy) - getattr(first, busy)
        return max(count, capacity, 1) / max(seconds, 1.0)
