"""The scheduler: `plan()` returns what the next step computes, `commit()` processes what a step produced.

It schedules the requests of the table on one data-parallel rank, or on several that step together. It works on plain
integers, without a device or a thread, so tests and simulators can drive it as the engine does. A plan may be made
while earlier ones are in flight; plans are committed in the order they were made.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from jaxserve.api_types import EngineRequest, EngineStats, FinishReason, TokenEvent, TokenLogprobs, Usage
from jaxserve.engine.kv_cache.host_tier import HostTier, WritePolicy
from jaxserve.engine.kv_cache.page_pool import PagePool
from jaxserve.engine.kv_cache.radix_cache import RadixCache
from jaxserve.engine.kv_cache.window_pages import WindowPages
from jaxserve.engine.scheduling import admission
from jaxserve.engine.scheduling.planner import Planner
from jaxserve.engine.scheduling.policy import Policy, WaitingQueue
from jaxserve.engine.scheduling.rank import Rank
from jaxserve.engine.scheduling.request import Phase, Request
from jaxserve.engine.scheduling.request_table import RequestTable
from jaxserve.engine.scheduling.retraction import Retraction
from jaxserve.engine.scheduling.scheduler_stats import SchedulerStats
from jaxserve.engine.speculation.speculation import Speculation
from jaxserve.step_plan import Capacity, Chunk, StepPlan, StepResult


class Scheduler:
    """Schedules requests within `capacity`, by `policy` and `conservativeness` (see the modules `policy`, `admission`).

    On each rank, a step has at most `max_num_batched_tokens` tokens, of which at most `chunked_prefill_size` and at
    most `max_prefill_tokens` belong to prompts. Beyond the free slots, at most `max_queued_requests` may wait (None: no
    limit). `random_seed` determines the seeds of requests without one. Each rank keeps pages evicted from its prefix
    cache in `num_host_pages` pages of host memory, by KV group (none if empty). `clock` returns seconds and measures
    queue time.
    Raises `ConfigError` if a limit is so low that nothing could ever run.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        chunked_prefill_size: int,
        max_prefill_tokens: int,
        max_num_batched_tokens: int,
        max_queued_requests: int | None = None,
        random_seed: int = 0,
        policy: Policy = "fcfs",
        conservativeness: float = 1.0,
        prefix_cache: bool = True,
        num_host_pages: Sequence[int] = (),
        host_write_policy: WritePolicy = "write_through",
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._clock = clock
        self._ranks = ranks = [
            _make_rank(index, capacity, num_host_pages, host_write_policy, prefix_cache=prefix_cache)
            for index in range(capacity.num_ranks)
        ]

        def cached(request: Request) -> int:
            namespace, fill, limit = request.namespace, request.fill_tokens, request.num_reusable_tokens
            return max(rank.cache.match_length(namespace, fill, limit) for rank in ranks)

        self._table = RequestTable(ranks, WaitingQueue(policy, cached, random_seed))
        self._ratio = admission.NewTokenRatio(conservativeness)
        self._planner = Planner(
            self._table,
            capacity,
            chunked_prefill_size=chunked_prefill_size,
            max_prefill_tokens=max_prefill_tokens,
            max_num_batched_tokens=max_num_batched_tokens,
            ratio=self._ratio,
            shares_prefixes=prefix_cache,
            speculation=speculation,
        )
        self._speculation = speculation
        self._max_queued_requests = max_queued_requests
        self._random = random.Random(random_seed)
        self._in_flight: deque[tuple[StepPlan, list[Request], float]] = deque()
        self._committed_at = 0.0
        self._events: list[TokenEvent] = []
        self._num_arrived = 0
        self._stats = SchedulerStats(capacity)
        self._retraction = Retraction(
            self._table, self._planner, self._ratio, self._stats, capacity, by_priority=policy == "priority"
        )

    def add(self, request: EngineRequest) -> TokenEvent | None:
        """Add a request, or return the only event of a rejected one."""
        if request.request_id in self._table.requests:
            return _rejection(request, f"a request with the id {request.request_id!r} is already open")
        if error := admission.rejection_reason(request, self._capacity):
            return _rejection(request, error)
        limit = self._max_queued_requests
        if limit is not None and self.num_waiting >= limit + self._table.num_free_slots:
            return _rejection(
                request,
                f"queue full: {self.num_waiting} requests wait and --max-queued-requests is {limit}; try again later",
            )
        sampling = request.sampling
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._random.getrandbits(63))
        self._num_arrived += 1
        if not self._table.requests:
            self._ratio.reset()
        self._table.add(
            Request(
                request,
                sampling=sampling,
                arrival=self._num_arrived,
                arrived_at=self._clock(),
                max_new_tokens=admission.max_new_tokens(request, self._capacity),
                rotation_length=self._capacity.rotation_length,
            )
        )
        return None

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request, waiting or running, and return its last event; None if no such request is open."""
        request = self._table.requests.get(request_id)
        return None if request is None else self._finish(request, FinishReason.ABORT)

    def plan(self) -> StepPlan | None:
        """Return the next step, or None if there is nothing to compute before a step in flight is committed."""
        table = self._table
        for rank in self._ranks:
            rank.release_planned()
        num_retracted = self._retraction.retract(self._events, in_flight=bool(self._in_flight))
        if num_retracted is None:
            return None
        # A request that was just retracted must not start again at once: it would take back the pages it freed.
        planned = self._planner.next_step(admit=num_retracted == 0)
        if planned is None:
            assert not table.waiting or self._in_flight, "requests wait, nothing runs, and none may start"
            return None
        plan, requests = planned
        self._in_flight.append((plan, requests, 0.0 if self._speculation is None else self._clock()))
        if plan.num_decodes:
            self._ratio.decay()
        if plan.opens:
            self._stats.count_starts(requests[-len(plan.opens) :], self._clock())
        self._stats.count_step(plan)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Process the result of the oldest plan in flight; drop tokens of requests that have ended meanwhile."""
        planned, requests, planned_at = self._in_flight.popleft()
        assert planned is plan, "plans are committed in the order they were made"
        if self._speculation is not None:
            self._time_step(plan, planned_at, self._speculation)
        self._stats.num_steps += 1
        events = self.take_events()
        logprobs = result.logprobs
        running = Phase.RUNNING
        num_tokens = 0
        for index, (request, chunk, tokens) in enumerate(zip(requests, plan.chunks, result.tokens, strict=True)):
            if request.phase is not running:
                continue
            request.num_computed_tokens += chunk.length
            if result.drafts and chunk.sample:
                self._count_drafts(request, chunk, result.drafts[index])
            if request.prompt_logprobs is not None:
                request.add_prompt_logprobs(result.prompt_logprobs.get(index, []))
            outputs = request.output_ids
            if not outputs and request.num_computed_tokens == request.num_prompt_tokens:
                self._stats.prompt_tokens += request.num_prompt_tokens
                if request.max_new_tokens == 0:
                    events.append(self._finish(request, FinishReason.LENGTH))
            if not tokens:
                continue
            reason = stop_id = None
            for count, token in enumerate(tokens, 1):
                outputs.append(token)
                if token in request.stop_ids and len(outputs) > request.min_tokens:
                    reason, stop_id = FinishReason.STOP, token
                elif len(outputs) >= request.max_new_tokens:
                    reason = FinishReason.LENGTH
                if reason is not None:
                    tokens = tokens[:count]
                    break
            num_tokens += len(tokens)
            if reason is not None:
                events.append(self._finish(request, reason, tokens, stop_id, logprobs.get(index)))
            elif request.wants_logprobs or request.queue_seconds is not None:
                prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
                queue_seconds, request.queue_seconds = request.queue_seconds, None
                events.append(
                    TokenEvent(
                        request.request_id,
                        tokens,
                        logprobs=logprobs.get(index),
                        prompt_logprobs=prompt_logprobs,
                        queue_seconds=queue_seconds,
                    )
                )
            else:
                events.append(TokenEvent(request.request_id, tokens))
        self._stats.generation_tokens += num_tokens
        return events

    def take_events(self) -> list[TokenEvent]:
        """Return and clear the events that arose while planning; `commit` also returns them."""
        events, self._events = self._events, []
        return events

    @property
    def has_work(self) -> bool:
        """Whether a request is open or an event has not been taken."""
        return bool(self._table.requests or self._events)

    @property
    def page_size(self) -> int:
        """The number of tokens in a page."""
        return self._capacity.page_size

    @property
    def last_decode_bucket(self) -> int:
        """The number of rows of the last decode program."""
        return self._stats.buckets.last_bucket

    @property
    def decode_steps_by_rows(self) -> dict[int, int]:
        """The number of decode steps since the start, by their number of rows; a copy."""
        return dict(self._stats.buckets.decode_steps_by_rows)

    @property
    def num_running(self) -> int:
        """The number of requests that have started and not ended."""
        return self._table.num_running

    @property
    def num_waiting(self) -> int:
        """The number of requests that have not started, or were retracted."""
        return len(self._table.waiting)

    def stats(self) -> EngineStats:
        """Return the current sizes and counters."""
        return self._stats.engine_stats(
            self._table,
            self._speculation,
            new_token_ratio=self._ratio.value,
            num_deferred=self._planner.prefills.num_deferred,
        )

    def flush_cache(self) -> int:
        """Remove all cached prefixes and return how many pages this freed.

        Running requests keep the pages they read until they end, but no lookup finds these pages.
        """
        return sum(rank.cache.flush() for rank in self._ranks)

    def check_integrity(self) -> list[str]:
        """Return the inconsistencies found in pages, slots and queues, as sentences."""
        return self._table.check()

    def _count_drafts(self, request: Request, chunk: Chunk, compared: tuple[int, int]) -> None:
        """Count a chunk's draft, and take back what was planned for the tokens that were rejected."""
        assert self._speculation is not None
        proposed, accepted = compared
        verified = chunk.tokens is None and chunk.length > 1
        self._speculation.count(request, proposed, accepted, verified=verified)
        if not verified:
            return
        drafts = chunk.length - 1
        request.num_computed_tokens -= drafts - accepted
        request.commit_drafts(drafts, accepted)
        if request.slot is not None:
            self._ranks[request.rank].give_up_rejected(request)

    def _time_step(self, plan: StepPlan, planned_at: float, speculation: Speculation) -> None:
        """Measure how long a step of decodes took since the one before, or since it was planned."""
        now, ranks = self._clock(), len(self._ranks)
        if plan.num_decodes == len(plan.chunks) and not plan.draft_reads:
            rows, tokens = plan.max_rank_rows(ranks), plan.max_rank_tokens(ranks)
            speculation.count_step(rows, tokens, now - max(planned_at, self._committed_at), plan.draft_steps)
        self._committed_at = now

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        token_ids: Sequence[int] = (),
        stop_id: int | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> TokenEvent:
        """Remove a request from the table and return its last event."""
        self._table.finish(request)
        return request.last_event(reason, list(token_ids), stop_id=stop_id, logprobs=logprobs)


def _make_rank(
    index: int, capacity: Capacity, num_host_pages: Sequence[int], policy: WritePolicy, *, prefix_cache: bool
) -> Rank:
    size, groups = capacity.page_size, capacity.window_groups
    pool = PagePool(capacity.num_pages, size)
    windows = [WindowPages(group.num_pages, size, group.window, i) for i, group in enumerate(groups)]
    copies = [
        WindowPages(num_pages, size, group.window, len(groups) + i)
        for i, (group, num_pages) in enumerate(zip(groups, num_host_pages[1:]))
    ]
    tier = HostTier(num_host_pages[0] if num_host_pages else 0, size, policy, copies)
    return Rank(index, capacity, RadixCache(pool, tier, windows, disabled=not prefix_cache), pool)


def _rejection(request: EngineRequest, error: str) -> TokenEvent:
    return TokenEvent(
        request.request_id,
        [],
        finish_reason=FinishReason.ERROR,
        usage=Usage(len(request.prompt_ids), 0),
        error=error,
    )
