"""Joins a scheduler to an executor: plan, dispatch, collect, commit, with one step in flight while the next is planned.

It owns the order of these four and nothing else; the caller's thread drives it, in a process of its own or not.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from jaxserve.api_types import EngineRequest, EngineStats, TokenEvent
from jaxserve.engine.core.profiling import Profiling
from jaxserve.engine.core.step_log import StepLog
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.errors import EngineDeadError
from jaxserve.observability.timeline import Timeline
from jaxserve.step_plan import Executor, StepPlan

logger = logging.getLogger("jaxserve.engine")


class EngineLoop:
    """With `overlap`, step N+1 is dispatched before the tokens of N are fetched; the tokens are the same either way.

    When the executor raises, what it held is lost: `step` raises `EngineDeadError` then and ever after. `timeline` gets
    the spans of its phases; `profiling` watches it when asked to.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        overlap: bool = True,
        decode_log_interval: int = 40,
        timeline: Timeline | None = None,
        profiling: Profiling | None = None,
    ) -> None:
        self.timeline = timeline or Timeline()
        self.profiling = profiling or Profiling()
        self._scheduler = scheduler
        self._executor = executor
        self._depth = 1 if overlap else 0
        self._in_flight: deque[tuple[StepPlan, object]] = deque()
        self._log = StepLog(scheduler, decode_log_interval)
        self._failure: str | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._in_flight) or self._scheduler.has_work

    def add(self, request: EngineRequest) -> TokenEvent | None:
        """Let a request in, or return the one event that refuses it."""
        return self._scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[TokenEvent]:
        """End requests wherever they stand and return their last events; ids that are not open are ignored."""
        return [event for request_id in request_ids if (event := self._scheduler.abort(request_id)) is not None]

    def step(self) -> list[TokenEvent]:
        """Dispatch a step if one can be planned, take in one that has ended if enough are under way."""
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        with self.timeline.span("plan"):
            plan = self._scheduler.plan()
        if plan is not None:
            handle = self._guard(lambda: self._executor.dispatch(plan))
            self._in_flight.append((plan, handle))
            self._log.planned(plan)
        if self._in_flight and (plan is None or len(self._in_flight) > self._depth):
            return self._collect()
        return self._scheduler.take_events()

    def flush(self) -> list[TokenEvent]:
        """Take in every step that is under way without starting another."""
        events: list[TokenEvent] = []
        while self._in_flight:
            events += self._collect()
        return events

    def flush_cache(self) -> int:
        """Forget every cached prefix, also while requests run, and return how many pages that gave back."""
        num_pages = self._scheduler.flush_cache()
        logger.info("Cache flushed: %d pages given back", num_pages)
        return num_pages

    def stats(self, *, check: bool = False) -> EngineStats:
        """A reading of the engine; with `check` the books are audited too, and decode steps come by their rows."""
        stats = self._scheduler.stats()
        compiles = self._executor.compiles_after_ready
        problems = tuple(self._scheduler.check_integrity()) if check else ()
        if compiles or check:
            stats = msgspec.structs.replace(
                stats,
                compiles_after_ready=compiles,
                integrity_errors=problems,
                decode_steps_by_rows=self._scheduler.decode_steps_by_rows if check else {},
            )
        return stats

    def _collect(self) -> list[TokenEvent]:
        plan, handle = self._in_flight.popleft()
        result = self._guard(lambda: self._executor.collect(handle))
        with self.timeline.span("commit"):
            events = self._scheduler.commit(plan, result)
        self._log.committed(plan)
        self.profiling.stepped()
        if not self.has_work:
            self._log.idle()
        return events

    def _guard[T](self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            self._failure = f"a step failed: {type(error).__name__}: {error}"
            raise EngineDeadError(self._failure) from error
