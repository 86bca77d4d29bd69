"""Says in the log what the engine is doing: a line for each step that computes prompts, one for every so many decodes.

It counts and formats; it changes nothing and is quiet while the engine is idle.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from jaxserve.engine.scheduler import Scheduler
from jaxserve.observability.log import decode_line, prefill_line
from jaxserve.step_plan import StepPlan

logger = logging.getLogger("jaxserve.engine")


class StepLog:
    """`interval` decode steps go by between two decode lines; `clock` gives seconds."""

    def __init__(self, scheduler: Scheduler, interval: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._interval = interval
        self._clock = clock
        self._num_decode_steps = 0
        self._since: float | None = None
        self._tokens_before = 0

    def planned(self, plan: StepPlan) -> None:
        """A step has been dispatched."""
        chunks = plan.chunks
        if len(chunks) > plan.num_decodes and logger.isEnabledFor(logging.INFO):
            stats = self._scheduler.stats()
            logger.info(
                prefill_line(
                    new_seq=len(plan.opens),
                    new_token=sum(chunk.length for chunk in chunks[plan.num_decodes :]),
                    cached_token=sum(opened.num_cached_tokens for opened in plan.opens),
                    token_usage=stats.token_usage,
                    running=stats.num_running,
                    queued=stats.num_waiting,
                )
            )

    def committed(self, plan: StepPlan) -> None:
        """A step has ended and its tokens are counted."""
        if self._since is None:
            self._restart()
        if not plan.num_decodes:
            return
        self._num_decode_steps += 1
        if self._num_decode_steps >= self._interval:
            stats = self._scheduler.stats()
            seconds = self._clock() - (self._since or 0.0)
            tokens = stats.generation_tokens - self._tokens_before
            logger.info(
                decode_line(
                    running=stats.num_running,
                    tokens=(stats.num_pages - stats.num_free_pages) * self._scheduler.page_size,
                    token_usage=stats.token_usage,
                    throughput=tokens / seconds if seconds > 0 else 0.0,
                    queued=stats.num_waiting,
                )
            )
            self._restart()

    def idle(self) -> None:
        """Nothing is left to do: the pause that follows is nobody's throughput."""
        self._since = None
        self._num_decode_steps = 0

    def _restart(self) -> None:
        self._since = self._clock()
        self._tokens_before = self._scheduler.stats().generation_tokens
        self._num_decode_steps = 0
