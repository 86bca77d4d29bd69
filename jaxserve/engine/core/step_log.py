"""Logs what the engine does: a line for each step with prompt chunks, and a line for every `interval` decode steps.

It counts and formats; it changes nothing and logs nothing while the engine is idle.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from jaxserve.api_types import EngineStats, StageTimes
from jaxserve.engine.scheduling.encoder_scheduler import AnyScheduler
from jaxserve.observability.acceptance import Acceptance, acceptance
from jaxserve.observability.log import decode_line, prefill_line
from jaxserve.observability.stage_times import times_since
from jaxserve.step_plan import StepPlan

logger = logging.getLogger("jaxserve.engine")


class StepLog:
    """The step log of one scheduler: a decode line every `interval` decode steps.

    `clock` returns seconds, and `stage_times` the times of the pipeline stages so far.
    """

    def __init__(
        self,
        scheduler: AnyScheduler,
        interval: int,
        clock: Callable[[], float] = time.monotonic,
        stage_times: Callable[[], tuple[StageTimes, ...]] = tuple,
    ) -> None:
        self._scheduler = scheduler
        self._interval = interval
        self._clock = clock
        self._stage_times = stage_times
        self._stages_before: tuple[StageTimes, ...] = ()
        self._num_decode_steps = 0
        self._since: float | None = None
        self._before = EngineStats()
        self._hits_before = 0

    def log_dispatched(self, plan: StepPlan) -> None:
        """Log a prefill line if the dispatched step has prompt chunks."""
        chunks = plan.chunks[plan.num_decodes + plan.num_forced :]
        if chunks and logger.isEnabledFor(logging.INFO):
            stats = self._scheduler.stats()
            logger.info(
                prefill_line(
                    # A bidirectional model opens no slots
                    new_seq=len(plan.opens) or sum(chunk.pooled for chunk in chunks if not chunk.start),
                    new_token=sum(chunk.length for chunk in chunks),
                    # The plan's cached tokens include restarts after a retraction, which don't count as hits.
                    cached_token=stats.cache_hit_tokens - self._hits_before,
                    usage=_usage(stats),
                    states=_states(stats),
                    running=stats.num_running,
                    queued=stats.num_waiting,
                    hit_rate=stats.cache_hit_tokens / max(stats.cache_query_tokens, 1),
                )
            )
            self._hits_before = stats.cache_hit_tokens

    def log_committed(self, plan: StepPlan) -> None:
        """Count a committed step, and log a decode line at the end of each interval."""
        if self._since is None:
            self._restart(self._scheduler.stats())
        if not plan.num_decodes:
            return
        self._num_decode_steps += 1
        if self._num_decode_steps >= self._interval:
            stats, before = self._scheduler.stats(), self._before
            seconds = self._clock() - (self._since or 0.0)
            tokens = stats.generation_tokens - before.generation_tokens
            used = stats.num_pages - stats.num_free_pages - stats.num_evictable_pages
            logger.info(
                decode_line(
                    running=stats.num_running,
                    tokens=used * self._scheduler.page_size,
                    usage=_usage(stats),
                    states=_states(stats),
                    throughput=tokens / seconds if seconds > 0 else 0.0,
                    queued=stats.num_waiting,
                    fine=stats.coarse_decode_steps == before.coarse_decode_steps,
                    bucket=self._scheduler.last_decode_bucket,
                    padding=_padding(stats, before),
                    acceptance=_acceptance(stats, before),
                    stages=times_since(self._stage_times(), self._stages_before),
                )
            )
            self._restart(stats)

    def mark_idle(self) -> None:
        """End the interval, so that the throughput of the next one excludes the idle time."""
        self._since = None
        self._num_decode_steps = 0

    def _restart(self, stats: EngineStats) -> None:
        self._since = self._clock()
        self._before = stats
        self._stages_before = self._stage_times()
        self._num_decode_steps = 0


def _padding(stats: EngineStats, before: EngineStats) -> float:
    """Return the share of padding in the programs of steps without prompts that ran since `before`."""
    (used, size), (used_before, size_before) = (
        (one.decode_rows + one.verify_tokens, one.decode_bucket_rows + one.verify_bucket_tokens)
        for one in (stats, before)
    )
    return 1.0 - (used - used_before) / (size - size_before) if size > size_before else 0.0


def _acceptance(stats: EngineStats, before: EngineStats) -> Acceptance | None:
    """Return the acceptance since `before`, or None if the engine doesn't speculate."""
    return acceptance(stats).since(acceptance(before)) if stats.accepted_by_position else None


def _usage(stats: EngineStats) -> tuple[float, ...]:
    """Return the shares of the KV cache in use: of all, and of whole sequences and windows if it has both."""
    if not stats.num_window_pages:
        return (stats.token_usage,)
    return stats.token_usage, stats.full_token_usage, stats.swa_token_usage


def _states(stats: EngineStats) -> tuple[int, float] | None:
    """Return the number and the share of the rows of states that running requests have, if there are any rows."""
    return (stats.num_states_used, stats.state_usage) if stats.num_states else None
