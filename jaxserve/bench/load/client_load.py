"""Watches the client itself: how late its event loop runs and how much of a core it takes.

A late loop reads tokens after they came, and what it reports of the server is then its own doing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time

import numpy as np

_INTERVAL = 0.02
MOST_LATE_MS = 10.0
MOST_CPU = 0.8


@dataclasses.dataclass(frozen=True, slots=True)
class ClientLoad:
    """`cpu_fraction` is of one core; lateness is that of a timer, in milliseconds."""

    cpu_fraction: float
    late_ms_p50: float
    late_ms_p99: float
    late_ms_max: float

    @property
    def starved(self) -> bool:
        """Whether it was late without having much to do: others had the cores."""
        return self.late_ms_p99 > MOST_LATE_MS and self.cpu_fraction < MOST_CPU / 2

    @property
    def bottleneck(self) -> bool:
        """Whether the figures are in doubt because of the client."""
        return self.late_ms_p99 > MOST_LATE_MS or self.cpu_fraction > MOST_CPU


class Watch:
    """Measures from `start` to `stop`, on the running loop."""

    def start(self) -> None:
        """Begin."""
        self._loop = asyncio.get_running_loop()
        self._late: list[float] = []
        self._began, self._cpu = time.perf_counter(), time.process_time()
        self._expect()

    def stop(self) -> ClientLoad:
        """End, and say what was seen."""
        self._timer.cancel()
        seconds, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu
        late = self._late or [0.0]
        p50, p99 = np.percentile(late, (50, 99))
        return ClientLoad(cpu / seconds if seconds else 0.0, 1e3 * float(p50), 1e3 * float(p99), 1e3 * max(late))

    def _expect(self) -> None:
        self._due = time.perf_counter() + _INTERVAL
        self._timer = self._loop.call_later(_INTERVAL, self._look)

    def _look(self) -> None:
        self._late.append(max(time.perf_counter() - self._due, 0.0))
        self._expect()
