"""The scheduler of a bidirectional model: a text is computed whole, in one step, and needs no page and no slot.

It has the methods of `Scheduler`, so that the same loop drives it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from jaxserve.api_types import EngineRequest, EngineStats, FinishReason, TokenEvent, Usage
from jaxserve.engine.kv_cache.cache_events import CacheEvent
from jaxserve.engine.scheduling import admission
from jaxserve.engine.scheduling.policy import Policy
from jaxserve.engine.scheduling.priorities import Priorities
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.engine.scheduling.scheduler_stats import SchedulerStats
from jaxserve.engine.scheduling.text_queue import TextQueue, WaitingText
from jaxserve.step_plan import Capacity, Chunk, DrawResult, StepPlan, StepResult


class _PlannedTexts(NamedTuple):
    """A plan in flight, with the texts of its chunks."""

    plan: StepPlan
    texts: list[WaitingText]


class EncoderScheduler:
    """Schedules texts within `capacity`, by `policy` (see `TextQueue`): up to `step_tokens` tokens a step and rank.

    On each rank, a step has at most `prefill_max_requests` texts, if that isn't None. Requests beyond `limits` are
    refused. `clock` returns seconds.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        step_tokens: int,
        limits: admission.QueueLimits | None = None,
        policy: Policy = "lpm",
        priorities: Priorities | None = None,
        prefill_max_requests: int | None = None,
        random_seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._clock = clock
        most = min(capacity.num_slots, prefill_max_requests or capacity.num_slots)
        self._queue = TextQueue(capacity, step_tokens, most, policy, random_seed)
        self._priorities = priorities or Priorities()
        self._gate = admission.QueueGate(limits or admission.QueueLimits())
        self._open: dict[str, WaitingText] = {}
        self._in_flight: deque[_PlannedTexts] = deque()
        self._stats = SchedulerStats(capacity)
        self._num_finished = 0

    def add(self, request: EngineRequest) -> TokenEvent | None:
        """Add a text, or return the only event of a rejected one."""
        if request.request_id in self._open:
            return admission.rejection(request, f"a request with the id {request.request_id!r} is already open")
        if error := admission.rejection_reason(request, self._capacity):
            return admission.rejection(request, error)
        free = self._capacity.num_ranks * self._capacity.num_slots - self.num_running
        if reason := self._gate.reason(
            request,
            num_waiting=self.num_waiting - max(free, 0),
            num_open=len(self._open),
            num_tokens=self._queue.num_tokens,
        ):
            return admission.rejection(request, reason)
        text = WaitingText(request, self._clock(), self._priorities.of_request(request.priority))
        self._open[request.request_id] = text
        self._queue.add(text)
        return None

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a text, waiting or in a step, and return its last event; None if no such request is open."""
        text = self._open.get(request_id)
        if text is None:
            return None
        if text.waits:
            self._queue.remove(text)
        return self._finish(text, FinishReason.ABORT)

    def plan(self) -> StepPlan | None:
        """Return the next step, or None if no text waits."""
        if not self.num_waiting:
            return None
        now = self._clock()
        chosen = self._queue.take(now)
        chunks = [
            Chunk(
                text.request.request_id,
                row,
                rank,
                0,
                text.length,
                text.request.prompt_ids,
                (),
                logits=0,
                sample=False,
                pooled=True,
                second_start=text.request.second_start,
            )
            for row, (text, rank) in enumerate(chosen)
        ]
        for text, _ in chosen:
            text.queue_seconds = now - text.arrived_at
        plan = StepPlan(opens=[], chunks=chunks, num_decodes=0, greedy=True)
        self._in_flight.append(_PlannedTexts(plan, [text for text, _ in chosen]))
        self._stats.count_step(plan)
        return plan

    def commit_draws(self, plan: StepPlan, result: DrawResult) -> list[TokenEvent]:
        """Raise `AssertionError`: no plan draws."""
        raise AssertionError("a bidirectional model draws nothing")

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Process the result of the oldest plan in flight; drop vectors of texts that have ended meanwhile."""
        planned, texts = self._in_flight.popleft()
        assert planned is plan, "plans are committed in the order they were made"
        self._stats.num_steps += 1
        events = []
        for index, text in enumerate(texts):
            if self._open.get(text.request.request_id) is text:
                self._stats.prompt_tokens += text.length
                events.append(self._finish(text, FinishReason.STOP, result.pooled[index]))
        return events

    def take_events(self) -> list[TokenEvent]:
        """Return []: planning ends no request."""
        return []

    def take_cache_events(self) -> list[list[CacheEvent]]:
        """Return []: nothing is cached."""
        return []

    @property
    def has_work(self) -> bool:
        """Whether a text is open."""
        return bool(self._open)

    @property
    def page_size(self) -> int:
        """The setting of this name. There are no pages."""
        return self._capacity.page_size

    @property
    def last_decode_bucket(self) -> int:
        """0: nothing decodes."""
        return 0

    @property
    def decode_steps_by_rows(self) -> dict[int, int]:
        """Nothing: nothing decodes."""
        return {}

    @property
    def num_running(self) -> int:
        """The number of texts that are in a step."""
        return len(self._open) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        """The number of texts that are in no step yet."""
        return self._queue.num_waiting

    def stats(self) -> EngineStats:
        """Return the current sizes and counters."""
        return EngineStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_queued_tokens=self._queue.num_tokens,
            num_finished=self._num_finished,
            **self._stats.of_prompts(),
        )

    def flush_cache(self) -> int:
        """Return 0: nothing is cached."""
        return 0

    def check_integrity(self) -> list[str]:
        """Return the inconsistencies found in the queue, as sentences."""
        waiting = [text for text in self._open.values() if text.waits]
        tokens, counted = sum(text.length for text in waiting), self._queue.num_tokens
        if (len(waiting), tokens) == (self.num_waiting, counted):
            return []
        return [f"{len(waiting)} texts of {tokens} tokens wait, and {self.num_waiting} of {counted} are counted"]

    def _finish(self, text: WaitingText, reason: FinishReason, pooled: bytes | None = None) -> TokenEvent:
        del self._open[text.request.request_id]
        self._num_finished += 1
        return TokenEvent(
            text.request.request_id,
            [],
            finish_reason=reason,
            usage=Usage(text.length, 0),
            queue_seconds=text.queue_seconds,
            pooled=pooled,
        )


AnyScheduler = Scheduler | EncoderScheduler
"""What decides the steps of an engine."""
