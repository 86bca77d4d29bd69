"""Measures the load client itself: how late its event loop runs and how much of a core it uses.

A late loop reads tokens after they arrived, and the latencies it reports are then partly its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time

import numpy as np

_INTERVAL = 0.02
MAX_LATE_MS = 10.0
MAX_CPU = 0.8


@dataclasses.dataclass(frozen=True, slots=True)
class ClientLoad:
    """`cpu_fraction` is the share of one core; `late_ms_*` is how late a timer fired, in milliseconds."""

    cpu_fraction: float
    late_ms_p50: float
    late_ms_p99: float
    late_ms_max: float

    @property
    def starved(self) -> bool:
        """Whether the loop was late with little to do, because other processes had the cores."""
        return self.late_ms_p99 > MAX_LATE_MS and self.cpu_fraction < MAX_CPU / 2

    @property
    def bottleneck(self) -> bool:
        """Whether the client makes the figures doubtful."""
        return self.late_ms_p99 > MAX_LATE_MS or self.cpu_fraction > MAX_CPU


class ClientMonitor:
    """Measures the running event loop from `start` to `stop`."""

    def start(self) -> None:
        """Start measuring."""
        self._loop = asyncio.get_running_loop()
        self._lateness: list[float] = []
        self._start, self._cpu = time.perf_counter(), time.process_time()
        self._schedule()

    def stop(self) -> ClientLoad:
        """Stop measuring and return the result."""
        self._timer.cancel()
        seconds, cpu = time.perf_counter() - self._start, time.process_time() - self._cpu
        late = self._lateness or [0.0]
        p50, p99 = np.percentile(late, (50, 99))
        return ClientLoad(cpu / seconds if seconds else 0.0, 1e3 * float(p50), 1e3 * float(p99), 1e3 * max(late))

    def _schedule(self) -> None:
        self._due = time.perf_counter() + _INTERVAL
        self._timer = self._loop.call_later(_INTERVAL, self._record)

    def _record(self) -> None:
        self._lateness.append(max(time.perf_counter() - self._due, 0.0))
        self._schedule()
