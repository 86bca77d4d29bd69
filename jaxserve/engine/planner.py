"""What one step computes: all decodes first, then chunks of prompts into what is left of the token budget.

It turns the roster's running requests into a `StepPlan`, lets waiting ones start, and gives each the pages its chunk
writes. Whether someone must give way first, and what becomes of the results, is the scheduler's.
"""

from __future__ import annotations

import math

from jaxserve.engine.admission import NewTokenRatio, may_start, reserved_tokens
from jaxserve.engine.budget import PrefillBudget, trim_to_bucket
from jaxserve.engine.request import Request
from jaxserve.engine.roster import Roster
from jaxserve.errors import ConfigError
from jaxserve.step_plan import Capacity, Chunk, SlotOpen, StepPlan

# A prefix shorter than this is computed twice rather than waited for.
_WORTH_WAITING = 32
_NO_PAGES: tuple[tuple[int, ...], ...] = ((),)


class Planner:
    """Plans within `capacity` and the limits of `Scheduler`. Raises `ConfigError` where nothing could ever run.

    `num_deferred` is how many waiting requests the last plan left for another one to compute their prefix.
    """

    def __init__(
        self,
        roster: Roster,
        capacity: Capacity,
        *,
        chunked_prefill_size: int,
        max_prefill_tokens: int,
        max_num_batched_tokens: int,
        ratio: NewTokenRatio,
        shares_prefixes: bool,
    ) -> None:
        for name, value in (
            ("chunked_prefill_size", chunked_prefill_size),
            ("max_prefill_tokens", max_prefill_tokens),
            ("max_num_batched_tokens", max_num_batched_tokens),
        ):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        assert capacity.decode_buckets[-1] >= capacity.num_slots, capacity
        assert capacity.prompt_logprob_tokens > capacity.num_slots, capacity
        self._roster = roster
        self._capacity = capacity
        self._page_size = capacity.page_size
        self._ratio = ratio
        self._shares_prefixes = shares_prefixes
        self.num_deferred = 0
        self._prefill_tokens = min(chunked_prefill_size, max_prefill_tokens)
        self._step_tokens = min(max_num_batched_tokens, capacity.token_buckets[-1])

    def next_step(self, *, admit: bool) -> tuple[StepPlan, list[Request]] | None:
        """The next step and the requests of its chunks, or None when nobody has a token to compute.

        With `admit`, waiting requests may start. Pages for all decodes are there: see `is_short_of_pages`.
        """
        roster = self._roster
        roster.cache.tier.save_entered()
        chunks: list[Chunk] = []
        requests: list[Request] = []
        opens: list[SlotOpen] = []
        greedy = self._plan_decodes(chunks, requests)
        num_decodes = len(chunks)
        if roster.prefilling or roster.waiting:
            for request, length in self._choose_prefills(num_decodes, opens, admit=admit):
                chunk = self._prefill_chunk(request, length)
                chunks.append(chunk)
                requests.append(request)
                greedy = greedy and (request.greedy or not chunk.sample)
        if not chunks:
            return None
        saves, loads = roster.cache.tier.take_copies()
        plan = StepPlan(
            saves=saves,
            loads=loads,
            opens=opens,
            chunks=chunks,
            closes=roster.take_closed_slots(opens),
            num_decodes=num_decodes,
            greedy=greedy,
        )
        return plan, requests

    def is_short_of_pages(self) -> bool:
        """Whether the decodes, or if there are none the oldest prefill, can't take their next step."""
        roster, page_size = self._roster, self._page_size
        if roster.decoding:
            num_free = roster.num_available_pages
            # Mostly there is a page for each, and then nobody needs to be asked.
            return len(roster.decoding) > num_free and num_free < sum(
                request.num_planned_tokens % page_size == 0 for request in roster.decoding.values()
            )
        oldest = next(iter(roster.prefilling.values()), None)
        return oldest is not None and roster.num_available_pages == 0 and oldest.num_planned_tokens % page_size == 0

    def could_start(self, request: Request, *, more_pages: int = 0) -> bool:
        """Whether a waiting request would find a slot and pages now, or with so many pages more than there are."""
        roster, cache = self._roster, self._roster.cache
        node, pages = cache.match(request.namespace, request.fill_tokens, request.num_reusable_tokens)
        cache.lock(node)
        running = [*roster.decoding.values(), *roster.prefilling.values()]
        starts = may_start(
            roster.pool.pages_for(request.num_fill_tokens) - len(pages),
            roster.num_available_pages + more_pages,
            math.ceil(reserved_tokens(running, self._ratio.value) / self._page_size),
            alone=not running,
        )
        cache.unlock(node)
        return starts and (roster.num_free_slots > 0 or more_pages > 0)

    def _plan_decodes(self, chunks: list[Chunk], requests: list[Request]) -> bool:
        """Append a chunk for each request that decodes; returns whether all of them are greedy."""
        roster, page_size = self._roster, self._page_size
        greedy = True
        ending = []
        for request in roster.decoding.values():
            position = request.num_planned_tokens
            slot = request.slot
            assert slot is not None
            chunks.append(
                Chunk(
                    request_id=request.request_id,
                    slot=slot,
                    rank=request.rank,
                    start=position,
                    length=1,
                    tokens=None,
                    new_pages=_NO_PAGES if position % page_size else roster.extend(request, position + 1),
                    logits=1,
                    sample=True,
                )
            )
            requests.append(request)
            request.num_planned_tokens = position + 1
            request.num_planned_outputs += 1
            if request.num_planned_outputs >= request.max_new_tokens:
                ending.append(request)
            if not request.greedy:
                greedy = False
        for request in ending:
            roster.promote(request, last=True)
        return greedy

    def _choose_prefills(self, num_decodes: int, opens: list[SlotOpen], *, admit: bool) -> list[tuple[Request, int]]:
        """Who computes how many of its fill tokens: a prompt under way first, then those that may start.

        Nobody overtakes but past one that waits for its prefix, and a chunk is cut short only by a budget or a pool
        that is then used up. So at most one prompt is ever halfway, and two never wait for each other's pages. What
        decodes take from it is got back by retraction.
        """
        roster, pool = self._roster, self._roster.pool
        budget = PrefillBudget(
            num_decodes,
            step_tokens=self._step_tokens,
            prefill_tokens=self._prefill_tokens,
            prompt_logprob_tokens=self._capacity.prompt_logprob_tokens,
        )
        chosen: list[tuple[Request, int]] = []
        spare = roster.num_available_pages
        for request in roster.prefilling.values():
            planned, held = request.num_planned_tokens, len(request.pages[0])
            wants = request.needs_prompt_logprobs
            room = (held + spare) * self._page_size - planned
            length = min(request.num_fill_tokens - planned, room, budget.offer(prompt_logprobs=wants))
            if length <= 0:
                return chosen
            budget.take(length, prompt_logprobs=wants)
            chosen.append((request, length))
            spare -= pool.pages_for(planned + length) - held
        if admit and roster.num_free_slots and roster.waiting:
            self._start_waiting(chosen, opens, budget, roster.num_available_pages - spare)
        if chosen and not budget.prompt_logprobs:  # those steps have a program of their own
            request, length = chosen[-1]
            chosen[-1] = request, length - trim_to_bucket(budget.total, length, self._capacity.token_buckets)
        return chosen

    def _start_waiting(
        self, chosen: list[tuple[Request, int]], opens: list[SlotOpen], budget: PrefillBudget, promised: int
    ) -> None:
        """Start waiting requests, in the order of the queue, as long as budget and pages allow.

        `promised` pages of those that are available are for chunks that are chosen already.
        """
        roster, cache, pool = self._roster, self._roster.cache, self._roster.pool
        ratio = self._ratio.value
        expected = reserved_tokens([*roster.decoding.values(), *roster.prefilling.values()], ratio)
        self.num_deferred = 0
        for waiting in roster.waiting.in_order():
            wants = waiting.needs_prompt_logprobs
            if not roster.num_free_slots or budget.offer(prompt_logprobs=wants) <= 0:
                return
            fill, reusable = waiting.fill_tokens, waiting.num_reusable_tokens
            node, pages = cache.match(waiting.namespace, fill, reusable)
            cached = (len(pages) + cache.num_absent(node)) * self._page_size
            if self._is_computed_by_another(waiting, fill, cached, chosen):
                self.num_deferred += 1
                continue
            cache.lock(node)
            needed = pool.pages_for(waiting.num_fill_tokens) - len(pages)  # also for what is loaded
            available = roster.num_available_pages - promised
            reserved = math.ceil(expected / self._page_size)
            alone = not (roster.prefilling or roster.decoding)
            if not may_start(needed, available, reserved, alone=alone):
                cache.unlock(node)
                return
            length = min(waiting.num_fill_tokens - cached, budget.offer(prompt_logprobs=wants))
            opens.append(roster.start(waiting, node, pages))
            budget.take(length, prompt_logprobs=wants)
            chosen.append((waiting, length))
            promised += pool.pages_for(waiting.num_fill_tokens) - len(waiting.pages[0])
            expected += reserved_tokens([waiting], ratio)

    def _is_computed_by_another(
        self, request: Request, fill: list[int], cached: int, chosen: list[tuple[Request, int]]
    ) -> bool:
        """Whether one that computes in this step has what comes next in `request`'s prompt: then its pages are shared
        from the next step on, and computing them twice would be a waste."""
        if not self._shares_prefixes:
            return False
        end = cached + max(_WORTH_WAITING, self._page_size) // self._page_size * self._page_size
        if end > request.num_reusable_tokens:
            return False
        return any(
            other.namespace == request.namespace
            and other.num_fill_tokens >= end
            and other.num_planned_tokens < end
            and other.tokens(cached, end) == fill[cached:end]
            and other.tokens(0, cached) == fill[:cached]
            for other, _ in chosen
        )

    def _prefill_chunk(self, request: Request, length: int) -> Chunk:
        """Plan the next `length` fill tokens of a request; with the last of them it draws its first new token."""
        start = request.num_planned_tokens
        end = start + length
        is_last = end == request.num_fill_tokens
        samples = is_last and request.max_new_tokens > 0
        wants = request.needs_prompt_logprobs
        slot = request.slot
        assert slot is not None
        chunk = Chunk(
            request_id=request.request_id,
            slot=slot,
            rank=request.rank,
            start=start,
            length=length,
            tokens=request.tokens(start, end),
            new_pages=self._roster.extend(request, end),
            logits=length if wants else int(samples),
            sample=samples,
            target=request.prompt_ids[end] if wants and end < request.num_prompt_tokens else None,
        )
        request.num_planned_tokens = end
        request.num_planned_outputs += samples
        self._roster.cache_prompt(request)
        if is_last:
            self._roster.promote(request, last=request.num_planned_outputs >= request.max_new_tokens)
        return chunk
