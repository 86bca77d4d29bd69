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
from typing import NamedTuple

import msgspec

from jaxserve.api_types import EngineRequest, EngineStats, FinishReason, TokenEvent, TokenLogprobs
from jaxserve.engine.kv_cache.cache_events import CacheEvent, CacheEventRecorder
from jaxserve.engine.kv_cache.eviction import EvictionPolicy
from jaxserve.engine.kv_cache.host_tier import HostTier, WritePolicy
from jaxserve.engine.kv_cache.page_pool import PagePool
from jaxserve.engine.kv_cache.radix_cache import RadixCache
from jaxserve.engine.kv_cache.state_pool import ON_DEVICE, StatePool
from jaxserve.engine.kv_cache.window_pages import WindowPages
from jaxserve.engine.scheduling import admission
from jaxserve.engine.scheduling.awaiting import AwaitingRequests
from jaxserve.engine.scheduling.grammars import Allowed, Grammars, RequestGrammar
from jaxserve.engine.scheduling.planner import Planner
from jaxserve.engine.scheduling.policy import Policy, RetractionPolicy, WaitingQueue
from jaxserve.engine.scheduling.priorities import Priorities
from jaxserve.engine.scheduling.rank import Rank
from jaxserve.engine.scheduling.request import Phase, Request
from jaxserve.engine.scheduling.request_states import RequestStates
from jaxserve.engine.scheduling.request_table import RequestTable
from jaxserve.engine.scheduling.retraction import Retraction
from jaxserve.engine.scheduling.scheduler_stats import SchedulerStats
from jaxserve.engine.scheduling.thinking import ThinkingCounter
from jaxserve.engine.speculation.speculation import Speculation
from jaxserve.step_plan import Capacity, Chunk, DrawResult, StepPlan, StepResult


class _Planned(NamedTuple):
    """A plan in flight, with the requests of its chunks and of its draws, and when it was made."""

    plan: StepPlan
    requests: list[Request]
    drawing: list[Request]
    at: float


class Scheduler:
    """Schedules requests within `capacity`, by `policy` and `conservativeness` (see the modules `policy`, `admission`).

    On each rank, a step has at most `max_num_batched_tokens` tokens, of which at most `chunked_prefill_size` and at
    most `max_prefill_tokens` belong to prompts, of at most `prefill_max_requests` requests (None: of any number); while
    several requests are open, at most `long_prefill_token_threshold` to one prompt, unless that is 0.
    Requests beyond `limits` are refused. `priorities` say what those of requests mean; the order of retraction depends
    on them if either this `policy` or `retraction_policy` is `priority`. `random_seed` determines the seeds of requests
    without one. Each rank keeps pages evicted from its prefix cache, by `eviction_policy`, in `num_host_pages` pages of
    host memory, by KV group (none if empty), and states in `num_host_states` rows. With `record_cache_events` it
    records what can be found in it. In a model that keeps a state for each sequence, long prompts leave a snapshot
    every `state_snapshot_interval` tokens, unless that is 0. Without `grammars`, requests that have one are rejected.
    With pipeline stages and without `overlap`, no request has two steps in flight; with one stage, that is the caller's
    choice. `clock` returns seconds and measures queue time. Raises `ConfigError` if a limit is so low that nothing
    could ever run.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        chunked_prefill_size: int,
        max_prefill_tokens: int,
        max_num_batched_tokens: int,
        limits: admission.QueueLimits | None = None,
        random_seed: int = 0,
        policy: Policy = "fcfs",
        priorities: Priorities | None = None,
        retraction_policy: RetractionPolicy = "length",
        prefill_max_requests: int | None = None,
        eviction_policy: EvictionPolicy = "lru",
        conservativeness: float = 1.0,
        prefix_cache: bool = True,
        num_host_pages: Sequence[int] = (),
        num_host_states: int = 0,
        host_write_policy: WritePolicy = "write_through",
        state_snapshot_interval: int = 0,
        record_cache_events: bool = False,
        long_prefill_token_threshold: int = 0,
        mixed_step_seconds: float = 0.0,
        pooled_time_share: float = 1.0,
        speculation: Speculation | None = None,
        grammars: Grammars | None = None,
        overlap: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._clock = clock
        size, count = capacity.page_size, capacity.num_ranks
        recorders = [CacheEventRecorder(size, needs_states=capacity.num_states > 0) for _ in range(count)]
        self._recorders = recorders if record_cache_events else []
        self._ranks = ranks = [
            _make_rank(
                index,
                capacity,
                num_host_pages,
                num_host_states,
                host_write_policy,
                recorder,
                eviction_policy,
                prefix_cache=prefix_cache,
                interval=state_snapshot_interval,
            )
            for index, recorder in enumerate(self._recorders or [None] * count)
        ]

        def cached(request: Request) -> int:
            namespace, fill, limit = request.namespace, request.fill_tokens, request.num_reusable_tokens
            return max(rank.cache.match_length(namespace, fill, limit) for rank in ranks)

        queues = (WaitingQueue(policy, cached, random_seed) for _ in range(2))
        self._table = RequestTable(ranks, *queues)
        self._ratio = admission.NewTokenRatio(conservativeness)
        self._planner = Planner(
            self._table,
            capacity,
            chunked_prefill_size=chunked_prefill_size,
            max_prefill_tokens=max_prefill_tokens,
            max_num_batched_tokens=max_num_batched_tokens,
            prefill_max_requests=prefill_max_requests,
            ratio=self._ratio,
            shares_prefixes=prefix_cache,
            long_prefill_token_threshold=long_prefill_token_threshold,
            mixed_step_seconds=mixed_step_seconds,
            pooled_time_share=pooled_time_share,
            speculation=speculation,
            overlap=overlap,
        )
        self._speculation = speculation
        self._awaiting = None if grammars is None else AwaitingRequests(grammars)
        self._gate = admission.QueueGate(limits or admission.QueueLimits())
        self._random = random.Random(random_seed)
        self._in_flight: deque[_Planned] = deque()
        self._committed_at = self._step_seconds = 0.0
        shares = capacity.pooled_size > 0 and pooled_time_share < 1.0
        self._times_steps = speculation is not None or grammars is not None or mixed_step_seconds > 0 or shares
        self._events: list[TokenEvent] = []
        self._num_arrived = 0
        self._stats = SchedulerStats(capacity)
        self._priorities = priorities or Priorities()
        self._retraction = Retraction(
            self._table,
            self._planner,
            self._ratio,
            self._stats,
            capacity,
            by_priority="priority" in (policy, retraction_policy),
            preempts=policy == "priority",
            priorities=self._priorities,
        )

    def add(self, request: EngineRequest) -> TokenEvent | None:
        """Add a request, or return the only event of a rejected one."""
        if request.request_id in self._table.requests:
            return admission.rejection(request, f"a request with the id {request.request_id!r} is already open")
        if error := admission.rejection_reason(request, self._capacity):
            return admission.rejection(request, error)
        if reason := self._gate.reason(
            request,
            num_waiting=self.num_waiting - self._table.num_free_slots,
            num_open=len(self._table.requests),
            num_tokens=self._table.num_queued_tokens,
        ):
            return admission.rejection(request, reason)
        if request.grammar and self._awaiting is None:
            return admission.rejection(request, "this engine follows no grammars")
        sampling = request.sampling
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._random.getrandbits(63))
        grammar, thinking = _grammar(request), _thinking(request)
        if grammar is not None:
            grammar.thinking, thinking = thinking, None
        self._num_arrived += 1
        if not self._table.requests:
            self._ratio.reset()
        added = Request(
            request,
            sampling=sampling,
            arrival=self._num_arrived,
            arrived_at=self._clock(),
            max_new_tokens=admission.max_new_tokens(request, self._capacity),
            priority=self._priorities.of_request(request.priority),
            rotation_length=self._capacity.rotation_length,
            grammar=grammar,
            thinking=thinking,
            pools_all_tokens=self._capacity.pools_all_tokens,
        )
        self._table.add(added)
        if added.grammar is not None and self._awaiting is not None:
            self._awaiting.add(added)
        return None

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request, waiting or running, and return its last event; None if no such request is open."""
        request = self._table.requests.get(request_id)
        return None if request is None else self._finish(request, FinishReason.ABORT)

    def plan(self) -> StepPlan | None:
        """Return the next step, or None if there is nothing to compute before a step in flight is committed."""
        table = self._table
        if self._awaiting:
            idle = not self._in_flight and all(request.grammar is not None for request in table.running)
            for request, found in self._awaiting.take(self._step_seconds, idle=idle):
                self._use(request, found)
        for rank in self._ranks:
            rank.release_planned()
        num_retracted = self._retraction.retract(self._events, in_flight=bool(self._in_flight))
        if num_retracted is None:
            return None
        # A request that was just retracted must not start again at once: it would take back the pages it freed.
        planned = self._planner.next_step(admit=num_retracted == 0)
        if planned is None:
            waits = self._in_flight or self._awaiting
            assert not table.num_waiting or waits, "requests wait, nothing runs, and none may start"
            return None
        plan, requests, drawing = planned
        now = self._clock() if self._times_steps else 0.0
        self._in_flight.append(_Planned(plan, requests, drawing, now))
        if plan.num_decodes:
            self._ratio.decay(self._planner.share)
        if plan.opens:
            self._stats.count_starts(requests[-len(plan.opens) :], self._clock())
        if plan.chunks:
            self._stats.count_step(plan)
        return plan

    def commit_draws(self, plan: StepPlan, result: DrawResult) -> list[TokenEvent]:
        """Process what the draws of the newest plan drew; drop tokens of requests that have ended meanwhile."""
        planned = self._in_flight[-1]
        assert planned.plan is plan, "draws are committed before the next step is planned"
        assert self._awaiting is not None
        events, drawn = self.take_events(), []
        for index, (request, draw, token) in enumerate(zip(planned.drawing, plan.draws, result.tokens, strict=True)):
            if request.phase is not Phase.RUNNING or draw.token is not None:
                continue
            tokens, reason, stop_id = request.add_outputs([token])
            if reason is FinishReason.LENGTH:
                reason = None  # its grammar says whether the output is complete
            events.append(self._report(request, tokens, reason, stop_id, result.logprobs.get(index)))
            if reason is None:
                drawn.append((request, token))
        self._awaiting.push(drawn)
        return events

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Process the result of the oldest plan in flight; drop tokens of requests that have ended meanwhile."""
        planned, requests, _, planned_at = self._in_flight.popleft()
        assert planned is plan, "plans are committed in the order they were made"
        if self._times_steps and plan.chunks:
            self._time_step(plan, planned_at)
        if self._planner.micro_batches is not None:
            self._planner.micro_batches.end_step()
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
            if not request.is_prompt_counted and request.num_computed_tokens == request.num_prompt_tokens:
                request.is_prompt_counted = True
                self._stats.prompt_tokens += request.num_prompt_tokens
                if request.pooled:
                    events.append(self._finish(request, FinishReason.STOP, pooled=result.pooled[index]))
                elif request.max_new_tokens == 0:
                    events.append(self._finish(request, FinishReason.LENGTH))
            if not tokens:
                continue
            outputs = request.output_ids
            if (
                len(tokens) == 1
                and len(outputs) + 1 < request.max_new_tokens
                and tokens[0] not in request.stop_ids
                and not request.wants_logprobs
                and request.queue_seconds is None
                and (request.thinking is None or request.passes(tokens[0]))
            ):  # nearly always, nothing ends and nothing else is reported
                outputs.append(tokens[0])
                num_tokens += 1
                events.append(TokenEvent(request.request_id, tokens))
            elif request.thinking is not None:
                events.append(self._add_counted(request, tokens, logprobs.get(index)))
            else:
                events.append(self._report(request, *request.add_outputs(tokens), logprobs.get(index)))
        self._stats.generation_tokens += num_tokens
        return events

    def take_events(self) -> list[TokenEvent]:
        """Return and clear the events that arose while planning; `commit` also returns them."""
        events, self._events = self._events, []
        return events

    def take_cache_events(self) -> list[list[CacheEvent]]:
        """Return and clear the recorded events of the prefix caches, by rank; none unless they are recorded."""
        return [recorder.take() for recorder in self._recorders]

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
        return self._table.num_waiting

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
        return self._table.check() + self._planner.prefills.check()

    def _report(
        self,
        request: Request,
        tokens: list[int],
        reason: FinishReason | None,
        stop_id: int | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> TokenEvent:
        """Return the event that reports tokens added to the output, which may end the request."""
        self._stats.generation_tokens += len(tokens)
        if reason is not None:
            return self._finish(request, reason, tokens, stop_id, logprobs)
        if not request.wants_logprobs and request.queue_seconds is None:
            return TokenEvent(request.request_id, tokens)
        prompt_logprobs, queue_seconds = request.take_first_report()
        return TokenEvent(
            request.request_id,
            tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            queue_seconds=queue_seconds,
            usage=None if queue_seconds is None else request.usage,
        )

    def _add_counted(self, request: Request, drawn: list[int], logprobs: list[TokenLogprobs] | None) -> TokenEvent:
        """Add drawn tokens to an output whose reasoning has a budget, and if it is used up, what ends the reasoning.

        The device draws the tokens of a request, so one that gets others starts again with these. Nothing of it is in
        flight, as no more is planned than its budget surely allows.
        """
        drawn, closing, reason, stop_id = request.add_counted_outputs(drawn)
        if logprobs is not None:
            logprobs = logprobs[: len(drawn)] + request.certain_logprobs(closing)
        if closing:
            self._stats.forced_tokens += len(closing)
            if reason is None and request.num_known_tokens > self._capacity.num_pages * self.page_size:
                self._stats.generation_tokens += len(drawn) + len(closing)
                self._table.finish(request)
                error = admission.pool_exhausted_error(request.num_known_tokens, self._capacity)
                return request.last_event(FinishReason.ERROR, drawn + closing, logprobs=logprobs, error=error)
        event = self._report(request, drawn + closing, reason, stop_id, logprobs)
        if closing and reason is None:
            assert request.num_planned_tokens == request.num_computed_tokens, "a step of it is in flight"
            self._table.retract(request)
        return event

    def _use(self, request: Request, found: Allowed) -> None:
        """Let a request go on as its grammar says. At its token limit, the grammar decides only why it ends."""
        if len(request.output_ids) >= request.max_new_tokens:
            ends = found.complete and not found.forced
            self._events.append(self._finish(request, FinishReason.STOP if ends else FinishReason.LENGTH))
            return
        if found.error is not None:
            self._table.finish(request)
            error = f"the grammar can't be followed any further: {found.error}"
            self._events.append(request.last_event(FinishReason.ERROR, [], error=error))
            return
        if found.forced or found.complete:
            tokens, reason, stop_id = request.add_outputs(list(found.forced))
            if found.complete and len(tokens) == len(found.forced) and stop_id is None:
                reason = FinishReason.STOP
            self._events.append(self._report(request, tokens, reason, stop_id))
            request.num_planned_outputs = len(request.output_ids)
            self._stats.forced_tokens += len(tokens)
        request.allowed = found.tokens

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

    def _time_step(self, plan: StepPlan, planned_at: float) -> None:
        """Measure how long a step took since the one before, or since it was planned."""
        now, ranks = self._clock(), len(self._ranks)
        self._step_seconds = seconds = now - max(planned_at, self._committed_at)
        self._planner.times.count_step(plan, seconds)
        if self._speculation is not None and plan.kind in ("decode", "verify") and not plan.draft_reads:
            rows, tokens = plan.max_rank_rows(ranks), plan.max_rank_tokens(ranks)
            self._speculation.count_step(rows, tokens, seconds, plan.draft_steps)
        self._committed_at = now

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        token_ids: Sequence[int] = (),
        stop_id: int | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        pooled: bytes | None = None,
    ) -> TokenEvent:
        """Remove a request from the table and return its last event."""
        self._table.finish(request)
        if request.grammar is not None and self._awaiting is not None:
            self._awaiting.release(request)
        return request.last_event(reason, list(token_ids), stop_id=stop_id, logprobs=logprobs, pooled=pooled)


def _make_rank(
    index: int,
    capacity: Capacity,
    num_host_pages: Sequence[int],
    num_host_states: int,
    policy: WritePolicy,
    recorder: CacheEventRecorder | None,
    eviction_policy: EvictionPolicy,
    *,
    prefix_cache: bool,
    interval: int,
) -> Rank:
    size, groups = capacity.page_size, capacity.window_groups
    pool = PagePool(capacity.num_pages, size)
    windows = [WindowPages(group.num_pages, size, group.window, i, eviction_policy) for i, group in enumerate(groups)]
    copies = [
        WindowPages(num_pages, size, group.window, len(groups) + i, eviction_policy)
        for i, (group, num_pages) in enumerate(zip(groups, num_host_pages[1:]))
    ]
    num_slots = num_host_pages[0] if num_host_pages else 0
    tier = HostTier(num_slots, size, policy, copies, recorder, num_host_states, eviction_policy)
    count = None if recorder is None else recorder.count_state
    states = StatePool(capacity.num_states, ON_DEVICE, count, eviction_policy) if capacity.num_states else None
    cache = RadixCache(pool, tier, windows, states, eviction_policy, disabled=not prefix_cache)
    return Rank(index, capacity, cache, pool, None if states is None else RequestStates(capacity, cache, interval))


def _grammar(request: EngineRequest) -> RequestGrammar | None:
    """Return the grammar of a request that produces any output."""
    sampling = request.sampling
    if not request.grammar or sampling.max_tokens == 0:
        return None
    return RequestGrammar(
        request.grammar,
        stop_ids=request.stop_ids,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        one_by_one=sampling.penalized or sampling.logprobs is not None,
    )


def _thinking(request: EngineRequest) -> ThinkingCounter | None:
    """Return the counter of a request that produces any output and has a budget for reasoning."""
    if request.thinking is None or request.sampling.max_tokens == 0:
        return None
    return ThinkingCounter(request.thinking)
