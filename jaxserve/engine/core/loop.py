"""The engine loop: plan, dispatch, collect, commit, with a step in flight on each stage while the next is planned.

It connects a scheduler to an executor and owns only the order of these four calls. The caller's thread drives it, in
the engine process or in the caller's own.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from jaxserve.api_types import EngineRequest, EngineStats, TokenEvent
from jaxserve.engine.core.profiling import Profiling
from jaxserve.engine.core.step_log import StepLog
from jaxserve.engine.kv_cache.cache_events import CacheEvent
from jaxserve.engine.scheduling.encoder_scheduler import AnyScheduler
from jaxserve.errors import EngineDeadError
from jaxserve.observability.timeline import Timeline
from jaxserve.step_plan import Executor, StepPlan

logger = logging.getLogger("jaxserve.engine")


class EngineLoop:
    """Runs the steps of one engine.

    With `overlap`, step N+1 is dispatched before the tokens of step N are fetched; the tokens are the same either way.
    With pipeline stages, as many steps as there are stages are in flight, and one more with `overlap`.
    If the executor raises, its state is lost: this and every later `step` raises `EngineDeadError`. `timeline` receives
    the spans of the phases; `profiling` counts the steps of a running profile.
    """

    def __init__(
        self,
        scheduler: AnyScheduler,
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
        self._depth = executor.capacity.num_stages - (0 if overlap else 1)
        self._in_flight: deque[tuple[StepPlan, object]] = deque()
        self._log = StepLog(scheduler, decode_log_interval, stage_times=executor.stage_times)
        self._drawing = False  # the newest step in flight has draws to commit
        self._failure: str | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._in_flight) or self._scheduler.has_work

    def add(self, request: EngineRequest) -> TokenEvent | None:
        """Add a request, or return the only event of a rejected one."""
        return self._scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[TokenEvent]:
        """End requests, waiting or running, and return their last events; ignore ids that are not open."""
        return [event for request_id in request_ids if (event := self._scheduler.abort(request_id)) is not None]

    def step(self) -> list[TokenEvent]:
        """Dispatch a step if one can be planned; commit the oldest one if enough are in flight. Return the events."""
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        with self.timeline.span("plan"):
            plan = self._scheduler.plan()
        if plan is not None:
            handle = self._guard(lambda: self._executor.dispatch(plan))
            self._in_flight.append((plan, handle))
            self._log.log_dispatched(plan)
            self._drawing = bool(plan.draws)
        events: list[TokenEvent] = []
        if self._in_flight and (plan is None or len(self._in_flight) > self._depth):
            if len(self._in_flight) == 1:
                events += self._collect_draws()
            events += self._collect()
        # The draws of the newest step are there as soon as the steps before it of the same requests are done.
        return events + self._collect_draws() + self._scheduler.take_events()

    def flush(self) -> list[TokenEvent]:
        """Commit every step in flight without starting another, and return the events."""
        events: list[TokenEvent] = []
        while self._in_flight:
            if len(self._in_flight) == 1:
                events += self._collect_draws()
            events += self._collect()
        return events

    def flush_cache(self) -> int:
        """Remove all cached prefixes, also while requests run, and return how many pages this freed."""
        num_pages = self._scheduler.flush_cache()
        logger.info("Cache flushed: %d pages freed", num_pages)
        return num_pages

    def take_cache_events(self) -> list[list[CacheEvent]]:
        """Return and clear the recorded events of the prefix caches, by rank."""
        return self._scheduler.take_cache_events()

    def stats(self, *, check: bool = False) -> EngineStats:
        """Return the engine's counters and sizes; with `check`, also the counters that take time to find."""
        stats = self._scheduler.stats()
        compiles, stages = self._executor.compiles_after_ready, self._executor.stage_times()
        problems = tuple(self._scheduler.check_integrity()) if check else ()
        if compiles or stages or check:
            stats = msgspec.structs.replace(
                stats,
                compiles_after_ready=compiles,
                stages=stages,
                integrity_errors=problems,
                decode_steps_by_rows=self._scheduler.decode_steps_by_rows if check else {},
                expert_tokens=self._guard(self._executor.expert_tokens) if check else (),
            )
        return stats

    def _collect_draws(self) -> list[TokenEvent]:
        """Commit the draws that the newest step in flight makes before it computes, unless they are committed."""
        if not self._drawing:
            return []
        self._drawing = False
        plan, handle = self._in_flight[-1]
        result = self._guard(lambda: self._executor.collect_draws(handle))
        with self.timeline.span("commit"):
            return self._scheduler.commit_draws(plan, result)

    def _collect(self) -> list[TokenEvent]:
        plan, handle = self._in_flight.popleft()
        result = self._guard(lambda: self._executor.collect(handle))
        with self.timeline.span("commit"):
            events = self._scheduler.commit(plan, result)
        self._log.log_committed(plan)
        self.profiling.count_step()
        if not self.has_work:
            self._log.mark_idle()
        return events

    def _guard[T](self, call: Callable[[], T]) -> T:
        """Return `call()`; if it raises, record the failure and raise `EngineDeadError`."""
        try:
            return call()
        except Exception as error:
            self._failure = f"a step failed: {type(error).__name__}: {error}"
            raise EngineDeadError(self._failure) from error
