"""Who runs when. `plan()` says what the next step computes, `commit()` takes in what it produced.

It decides over the roster's requests, on one data-parallel rank or several that step together, and is plain integers
throughout: no device, no clock, no thread, so a test or a simulator drives it as well as the engine does. A plan may be
made while earlier ones are in flight; they are committed in the order they were made.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable

import msgspec

from jaxserve.api_types import EngineRequest, EngineStats, FinishReason, TokenEvent, TokenLogprobs, Usage
from jaxserve.engine.kv_cache.host_tier import HostTier, WritePolicy
from jaxserve.engine.kv_cache.page_pool import PagePool
from jaxserve.engine.kv_cache.radix_cache import RadixCache
from jaxserve.engine.scheduling import admission
from jaxserve.engine.scheduling.planner import Planner
from jaxserve.engine.scheduling.policy import Policy, WaitingQueue, choose_victim
from jaxserve.engine.scheduling.rank import Rank
from jaxserve.engine.scheduling.request import Phase, Request
from jaxserve.engine.scheduling.request_table import Roster
from jaxserve.engine.scheduling.scheduler_stats import Tally
from jaxserve.step_plan import Capacity, StepPlan, StepResult

logger = logging.getLogger("jaxserve.engine")


class Scheduler:
    """Decides within what `capacity` can hold, by `policy` and `conservativeness` (see `policy`, `admission`).

    A step has at most `max_num_batched_tokens` tokens, of them at most `chunked_prefill_size` and `max_prefill_tokens`
    of prompts, on each rank. At most `max_queued_requests` may wait beyond those that free slots could take (None: no
    limit).
    `random_seed` decides the seeds of requests that bring none. What is evicted from the prefix cache is kept in
    `num_host_pages` pages of host memory, on each rank. `clock` gives seconds, for the time spent waiting.
    Raises `ConfigError` where nothing could ever run.
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
        num_host_pages: int = 0,
        host_write_policy: WritePolicy = "write_through",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._clock = clock
        self._ranks = ranks = [
            _make_rank(index, capacity, HostTier(num_host_pages, capacity.page_size, host_write_policy), prefix_cache)
            for index in range(capacity.num_ranks)
        ]

        def cached(request: Request) -> int:
            namespace, fill, limit = request.namespace, request.fill_tokens, request.num_reusable_tokens
            return max(rank.cache.match_length(namespace, fill, limit) for rank in ranks)

        self._by_priority = policy == "priority"
        self._roster = Roster(ranks, WaitingQueue(policy, cached, random_seed))
        self._ratio = admission.NewTokenRatio(conservativeness)
        self._planner = Planner(
            self._roster,
            capacity,
            chunked_prefill_size=chunked_prefill_size,
            max_prefill_tokens=max_prefill_tokens,
            max_num_batched_tokens=max_num_batched_tokens,
            ratio=self._ratio,
            shares_prefixes=prefix_cache,
        )
        self._max_queued_requests = max_queued_requests
        self._random = random.Random(random_seed)
        self._in_flight: deque[tuple[StepPlan, list[Request]]] = deque()
        self._events: list[TokenEvent] = []
        self._num_arrived = 0
        self._tally = Tally(capacity)

    def add(self, request: EngineRequest) -> TokenEvent | None:
        """Let a request in, or return the one event that refuses it."""
        if request.request_id in self._roster.requests:
            return _refused(request, f"a request with the id {request.request_id!r} is already open")
        if error := admission.refusal(request, self._capacity):
            return _refused(request, error)
        limit = self._max_queued_requests
        if limit is not None and self.num_waiting >= limit + self._roster.num_free_slots:
            return _refused(
                request,
                f"queue full: {self.num_waiting} requests wait and --max-queued-requests is {limit}; try again later",
            )
        sampling = request.sampling
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._random.getrandbits(63))
        self._num_arrived += 1
        if not self._roster.requests:
            self._ratio.reset()
        self._roster.enter(
            Request(
                request,
                sampling=sampling,
                arrival=self._num_arrived,
                arrived_at=self._clock(),
                max_new_tokens=admission.max_new_tokens(request, self._capacity),
            )
        )
        return None

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request wherever it stands and return its last event; None when no such request is open."""
        request = self._roster.requests.get(request_id)
        return None if request is None else self._finish(request, FinishReason.ABORT)

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute before a step in flight has been committed."""
        roster = self._roster
        for rank in self._ranks:
            rank.release_finishing()
        num_retracted = self._make_room()
        if num_retracted == 0:
            num_retracted = self._preempt_for_priority()
        if num_retracted is None:
            return None
        # Whoever was just retracted must not start again at once: it would take the pages it was to give.
        planned = self._planner.next_step(admit=num_retracted == 0)
        if planned is None:
            assert not roster.waiting or self._in_flight, "requests wait, nothing runs, and none may start"
            return None
        self._in_flight.append(planned)
        plan, requests = planned
        if plan.num_decodes:
            self._ratio.decode_step()
        if plan.opens:
            self._tally.started(requests[-len(plan.opens) :], self._clock())
        self._tally.planned(plan)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Credit what the oldest plan in flight produced; tokens of requests that have ended meanwhile are dropped."""
        planned, requests = self._in_flight.popleft()
        assert planned is plan, "plans are committed in the order they were made"
        self._tally.num_steps += 1
        events = self.take_events()
        logprobs = result.logprobs
        running = Phase.RUNNING
        num_tokens = 0
        for index, (request, chunk, tokens) in enumerate(zip(requests, plan.chunks, result.tokens, strict=True)):
            if request.phase is not running:
                continue
            request.num_computed_tokens += chunk.length
            if request.prompt_logprobs is not None:
                request.take_prompt_logprobs(result.prompt_logprobs.get(index, []))
            outputs = request.output_ids
            if not outputs and request.num_computed_tokens == request.num_prompt_tokens:
                self._tally.prompt_tokens += request.num_prompt_tokens
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
        self._tally.generation_tokens += num_tokens
        return events

    def take_events(self) -> list[TokenEvent]:
        """Events that arose while planning, each once; `commit` brings them too."""
        events, self._events = self._events, []
        return events

    @property
    def has_work(self) -> bool:
        """Whether any request is open, or an event waits to be taken."""
        return bool(self._roster.requests or self._events)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._capacity.page_size

    @property
    def last_decode_bucket(self) -> int:
        """Rows of the decode program that ran last."""
        return self._tally.padding.last_bucket

    @property
    def decode_steps_by_rows(self) -> dict[int, int]:
        """How many decode steps had so many rows, since the start; a copy."""
        return dict(self._tally.padding.decode_steps_by_rows)

    @property
    def num_running(self) -> int:
        """Requests that have started and not ended."""
        return self._roster.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that have not started, or were retracted."""
        return len(self._roster.waiting)

    def stats(self) -> EngineStats:
        """A reading of the sizes and counters that the scheduler knows."""
        return self._tally.reading(
            self._roster, new_token_ratio=self._ratio.value, num_deferred=self._planner.num_deferred
        )

    def flush_cache(self) -> int:
        """Forget all cached prefixes, and return how many pages became free by it.

        Pages that running requests read stay theirs until they end; nobody finds them any more.
        """
        return sum(rank.cache.flush() for rank in self._ranks)

    def check_integrity(self) -> list[str]:
        """What is wrong with pages, slots and queues, as sentences; empty when nothing is."""
        return self._roster.check()

    def _make_room(self) -> int | None:
        """Retract until those that run can go on, and return how many were. None: wait for the step in flight first.

        It may end requests and so free pages; and once it is committed, all tokens of a victim are known here.
        """
        roster = self._roster
        num_retracted = 0
        for rank in self._ranks:
            while self._planner.is_short_of_pages(rank):
                if self._in_flight:
                    return None
                running = rank.running
                if len(running) == 1:
                    error = admission.pool_exhausted(running[0].num_known_tokens, self._capacity)
                    self._events.append(self._finish(running[0], FinishReason.ERROR, error=error))
                else:
                    roster.retract(choose_victim(running, by_priority=self._by_priority))
                    num_retracted += 1
        if num_retracted:
            self._tally.num_retractions += num_retracted
            before = self._ratio.value
            self._ratio.retracted(list(roster.running))
            logger.warning(
                "decode out of memory happened, #retracted_reqs: %d, #new_token_ratio: %.4f -> %.4f, "
                "#running-req: %d, #queue-req: %d, total_cumulative_preemption_cnt: %d",
                num_retracted,
                before,
                self._ratio.value,
                self.num_running,
                self.num_waiting,
                self._tally.num_preemptions,
            )
        return num_retracted

    def _preempt_for_priority(self) -> int | None:
        """Retract requests of lower priority where the first that waits can't start without; None: wait first.

        Returns 0: those that made room are behind it in the queue, so that it may start in the same plan.
        """
        roster = self._roster
        first = next(roster.waiting.in_order(), None) if self._by_priority else None
        if first is None or any(self._planner.could_start(first, rank) for rank in self._ranks):
            return 0
        for rank in self._ranks:
            lower = [request for request in rank.running if request.priority < first.priority]
            held = sum(len(request.pages[0]) for request in lower)
            if lower and self._planner.could_start(first, rank, more_pages=held):
                break
        else:
            return 0
        if self._in_flight:
            return None
        num_retracted = 0
        while lower and not self._planner.could_start(first, rank):
            victim = choose_victim(lower, by_priority=True)
            lower.remove(victim)
            roster.retract(victim)
            num_retracted += 1
        self._tally.num_priority_preemptions += num_retracted
        logger.info(
            "preempted %d running requests for one of priority %d, #running-req: %d, #queue-req: %d, "
            "total_cumulative_preemption_cnt: %d",
            num_retracted,
            first.priority,
            self.num_running,
            self.num_waiting,
            self._tally.num_preemptions,
        )
        return 0

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        token_ids: list[int] | None = None,
        stop_id: int | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
    ) -> TokenEvent:
        """Take a request out of the books and return its last event."""
        self._roster.leave(request)
        token_ids = token_ids or []
        return TokenEvent(
            request.request_id,
            token_ids,
            finish_reason=reason,
            stop_id=stop_id,
            logprobs=None if logprobs is None else logprobs[: len(token_ids)],
            prompt_logprobs=None if request.needs_prompt_logprobs else request.prompt_logprobs,
            usage=request.usage,
            error=error,
            queue_seconds=request.queue_seconds,
        )


def _make_rank(index: int, capacity: Capacity, tier: HostTier, prefix_cache: bool) -> Rank:
    pool = PagePool(capacity.num_pages, capacity.page_size)
    return Rank(index, capacity, RadixCache(pool, tier, disabled=not prefix_cache), pool)


def _refused(request: EngineRequest, error: str) -> TokenEvent:
    return TokenEvent(
        request.request_id,
        [],
        finish_reason=FinishReason.ERROR,
        usage=Usage(len(request.prompt_ids), 0),
        error=error,
    )
