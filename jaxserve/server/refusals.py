"""Requests that a limit of the queue refuses: counts them, logs them, and says when each client should return.

It knows the clients only as places in a line, one line for each limit. Never decides what is refused.
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


class ReturnLine:
    """The clients of one limit that were told when to return and whose turn has not come.

    It is counted in what the limit counts: sequences or prompt tokens. It gets shorter as fast as there is room,
    whether a client returns in its turn or not.
    """

    def __init__(self) -> None:
        self._length = 0.0
        self._at = 0.0

    def join(self, now: float, *, excess: int, size: int, rate: float) -> int:
        """Return in how many seconds a client should return, whose request takes `size` places at the end.

        There is room for the first in the line when `excess` places have become free, at `rate` places per second.
        """
        waiting = max(0.0, self._length - rate * (now - self._at))
        self._at = now
        self._length = min(waiting + size, rate * MOST_SECONDS)
        return min(max(1, math.ceil((excess + waiting) / rate)), MOST_SECONDS)


class Refusals:
    """The refused requests of a server.

    `reading` returns the engine's latest statistics, or None while there is no engine; `most_open` is the limit of open
    requests, if there is one. `counters` count refusals by setting. `clock` returns seconds.
    """

    def __init__(
        self,
        reading: Callable[[], Reading | None],
        most_open: int | None,
        counters: Mapping[str, Counter],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reading = reading
        self._most_open = most_open
        self._counters = counters
        self._clock = clock
        self._turnover = Turnover()
        self._most_running = 1
        self._lines = {setting: ReturnLine() for setting in QUEUE_LIMITS}
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
        if setting == "max_num_queued_tokens":
            size = sum(len(request.prompt_ids) for request in requests)
            excess, never = error.found - limit + 1, limit == 0
            rate = self._turnover.prompt_tokens(limit)
        else:
            size = len(requests)
            excess, never = error.found - limit + size, size > limit
            rate = self._turnover.requests(self._most_running)
        error.retry_after = (
            MOST_SECONDS if never else self._lines[setting].join(now, excess=excess, size=size, rate=rate)
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
