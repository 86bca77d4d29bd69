"""Requests that a limit of the queue refuses: counts them, logs them, and says when each client should return.

It does not know the clients, only what it promised them. Never decides what is refused.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import Counter

from jaxserve.api_types import EngineRequest
from jaxserve.errors import QUEUE_LIMITS, QueueFullError
from jaxserve.observability.engine_metrics import Reading
from jaxserve.observability.turnover import Turnover

logger = logging.getLogger("jaxserve.server")

MOST_SECONDS = 600
_LOG_SECONDS = 5.0
_ROUNDING = 1e-6


class ReturnTimes:
    """When the clients that one limit refuses should return: in the first seconds whose room is not promised to others.

    Room is counted in what the limit counts, sequences or prompt tokens. What comes free in one second is promised for
    the next. A client that returns in vain asks anew: what it was promised does not count twice.
    """

    def __init__(self) -> None:
        self._promised: dict[int, float] = {}
        """The room that is promised of each second."""
        self._rate = 0.0
        self._full = (0, 0)
        """A range of seconds without room at this rate."""

    def add(self, now: float, *, lacking: float, size: float, rate: float, begins: bool = False) -> int:
        """Return in how many seconds a client should return.

        `rate` is the room that comes free per second; there is room for others after the first `lacking`. The request
        takes `size`, which must be free at once, or with `begins` a part of it.
        """
        this_second, at = int(now), now + max(lacking, 0.0) / rate
        size += min(lacking, 0.0)
        first, last = self._full
        if rate > self._rate or not first <= int(at) <= last:
            first = last = int(at)
            self._promised = {second: room for second, room in self._promised.items() if second >= this_second}
        turn = MOST_SECONDS
        while last < this_second + MOST_SECONDS:
            taken = self._promised.get(last, 0.0)
            room = min(size, max(0.0, rate * min(last + 1 - at, 1.0) - taken))
            self._promised[last] = taken + room
            size -= room
            is_free = size < _ROUNDING
            if is_free or (begins and room > 0.0):
                turn = min(turn, last + 1 - this_second)
            if is_free:
                break
            last += 1
        self._rate, self._full = rate, (first, last)
        return turn


class Refusals:
    """The refused requests of a server.

    `reading` returns the engine's latest statistics, or None while there is no engine; `most_open` is the limit of open
    requests, if there is one. `counters` count refusals by setting. Each of `num_processes` API processes promises its
    part of the room. `clock` returns seconds.
    """

    def __init__(
        self,
        reading: Callable[[], Reading | None],
        most_open: int | None,
        counters: Mapping[str, Counter],
        clock: Callable[[], float] = time.monotonic,
        *,
        num_processes: int = 1,
    ) -> None:
        self._reading = reading
        self._most_open = most_open
        self._counters = counters
        self._num_processes = num_processes
        self._clock = clock
        self._turnover = Turnover()
        self._most_running = 1
        self._times = {setting: ReturnTimes() for setting in QUEUE_LIMITS}
        self._num_unlogged = 0
        self._logged_at = -math.inf

    def tick(self) -> None:
        """Record a reading of the engine. Call it about once a second."""
        reading = self._reading()
        if reading is not None:
            info, stats = reading
            self._most_running = info.max_running_requests
            if self._most_open is not None:
                self._most_running = min(self._most_running, max(self._most_open, 1))
            self._turnover.record(self._clock(), stats, self._most_running)

    def count(self, error: QueueFullError, requests: Sequence[EngineRequest]) -> None:
        """Count a refused request with these sequences, and set when its client should return."""
        setting, limit, now = error.setting, error.limit, self._clock()
        counts_tokens = setting == "max_num_queued_tokens"
        if counts_tokens:
            size = sum(len(request.prompt_ids) for request in requests)
            lacking, never = error.found - limit, limit == 0
            rate = self._turnover.prompt_tokens(limit)
        else:
            size = len(requests)
            lacking, never = error.found - limit, size > limit
            rate = self._turnover.requests(self._most_running)
        times = self._times[setting]
        error.retry_after = (
            MOST_SECONDS
            if never
            else times.add(now, lacking=lacking, size=size, rate=rate / self._num_processes, begins=counts_tokens)
        )
        self._counters[setting].inc()
        self._num_unlogged += 1
        if now - self._logged_at >= _LOG_SECONDS:
            logger.warning(
                "Refused requests since the last such line: %d. The last one: %s; it may return in %d s",
                self._num_unlogged,
                error,
                error.retry_after,
            )
            self._num_unlogged, self._logged_at = 0, now
