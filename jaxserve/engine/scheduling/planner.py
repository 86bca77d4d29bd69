"""What one step computes: all decodes first, then chunks of prompts into what is left of the token budget.

It turns the roster's running requests into a `StepPlan`, lets waiting ones start, and gives each the pages its chunk
writes. One plan is for all data-parallel ranks, which step together; each has a token budget and pages of its own.
Whether someone must give way first, and what becomes of the results, is the scheduler's.
"""

from __future__ import annotations

import math

from jaxserve.engine.scheduling.admission import NewTokenRatio, may_start, reserved_tokens
from jaxserve.engine.scheduling.budget import PrefillBudget, trim_to_bucket
from jaxserve.engine.scheduling.rank import Rank
from jaxserve.engine.scheduling.rank_router import by_cost
from jaxserve.engine.scheduling.request import Request
from jaxserve.engine.scheduling.request_table import Roster
from jaxserve.errors import ConfigError
from jaxserve.step_plan import Capacity, Chunk, Copy, SlotOpen, StepPlan

# A prefix shorter than this is computed twice rather than waited for.
_WORTH_WAITING = 32
# So many that wait for a rank of their choice are looked past in a step: each look asks every rank's cache.
_MOST_LEFT = 16
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
        chunks: list[Chunk] = []
        requests: list[Request] = []
        opens: list[SlotOpen] = []
        greedy = True
        decodes = []
        for rank in roster.ranks:
            rank.cache.tier.save_entered()
            before = len(chunks)
            greedy = self._plan_decodes(rank, chunks, requests) and greedy
            decodes.append(len(chunks) - before)
        num_decodes = len(chunks)
        for request, length in self._choose_prefills(decodes, opens, admit=admit):
            chunk = self._prefill_chunk(request, length)
            chunks.append(chunk)
            requests.append(request)
            greedy = greedy and (request.greedy or not chunk.sample)
        if not chunks:
            return None
        saves, loads = self._take_copies()
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

    def is_short_of_pages(self, rank: Rank) -> bool:
        """Whether the rank's decodes, or if there are none its oldest prefill, can't take their next step."""
        page_size = self._page_size
        if rank.decoding:
            num_free = rank.num_available_pages
            # Mostly there is a page for each, and then nobody needs to be asked.
            return len(rank.decoding) > num_free and num_free < sum(
                request.num_planned_tokens % page_size == 0 for request in rank.decoding.values()
            )
        oldest = next(iter(rank.prefilling.values()), None)
        return oldest is not None and rank.num_available_pages == 0 and oldest.num_planned_tokens % page_size == 0

    def could_start(self, request: Request, rank: Rank, *, more_pages: int = 0) -> bool:
        """Whether a waiting request would find a slot and pages on a rank now, or with so many pages more."""
        cache = rank.cache
        node, pages = cache.match(request.namespace, request.fill_tokens, request.num_reusable_tokens)
        cache.lock(node)
        running = rank.running
        starts = may_start(
            rank.pool.pages_for(request.num_fill_tokens) - len(pages),
            rank.num_available_pages + more_pages,
            math.ceil(reserved_tokens(running, self._ratio.value) / self._page_size),
            alone=not running,
        )
        cache.unlock(node)
        return starts and (rank.num_free_slots > 0 or more_pages > 0)

    def _take_copies(self) -> tuple[list[Copy], list[Copy]]:
        """Saves and loads of all ranks."""
        saves: list[Copy] = []
        loads: list[Copy] = []
        for rank in self._roster.ranks:
            saved, loaded = rank.cache.tier.take_copies()
            if saved or loaded:
                saves += [(rank.index, *copy) for copy in saved]
                loads += [(rank.index, *copy) for copy in loaded]
        return saves, loads

    def _plan_decodes(self, rank: Rank, chunks: list[Chunk], requests: list[Request]) -> bool:
        """Append a chunk for each request of a rank that decodes; returns whether all of them are greedy."""
        page_size, index = self._page_size, rank.index
        greedy = True
        ending = []
        for request in rank.decoding.values():
            position = request.num_planned_tokens
            slot = request.slot
            assert slot is not None
            chunks.append(
                Chunk(
                    request_id=request.request_id,
                    slot=slot,
                    rank=index,
                    start=position,
                    length=1,
                    tokens=None,
                    new_pages=_NO_PAGES if position % page_size else rank.extend(request, position + 1),
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
            rank.promote(request, last=True)
        return greedy

    def _choose_prefills(
        self, num_decodes: list[int], opens: list[SlotOpen], *, admit: bool
    ) -> list[tuple[Request, int]]:
        """Who computes how many of its fill tokens: prompts under way first, then those that may start.

        Nobody overtakes but past one that waits for its prefix, and a chunk is cut short only by a budget or a pool
        that is then used up. So on each rank at most one prompt is ever halfway, and two never wait for each other's
        pages. What decodes take from it is got back by retraction.
        """
        roster = self._roster
        halfway = [request for rank in roster.ranks for request in rank.prefilling.values()]
        admit = admit and bool(roster.waiting) and any(rank.num_free_slots for rank in roster.ranks)
        if not halfway and not admit:
            return []
        budget = PrefillBudget(
            num_decodes,
            step_tokens=self._step_tokens,
            prefill_tokens=self._prefill_tokens,
            prompt_logprob_tokens=self._capacity.prompt_logprob_tokens,
        )
        chosen: list[tuple[Request, int]] = []
        promised = [0] * len(roster.ranks)
        open_ranks = list(roster.ranks)
        # The oldest first: beside prompts that are scored, others must keep to a smaller program.
        for request in sorted(halfway, key=lambda request: request.arrival) if len(halfway) > 1 else halfway:
            rank = roster.ranks[request.rank]
            planned, held = request.num_planned_tokens, len(request.pages[0])
            wants = request.needs_prompt_logprobs
            room = (held + rank.num_available_pages - promised[rank.index]) * self._page_size - planned
            length = min(request.num_fill_tokens - planned, room, budget.offer(rank.index, prompt_logprobs=wants))
            if length <= 0:
                open_ranks.remove(rank)
                continue
            budget.take(rank.index, length, prompt_logprobs=wants)
            chosen.append((request, length))
            promised[rank.index] += rank.pool.pages_for(planned + length) - held
        if admit:
            self._start_waiting(open_ranks, chosen, opens, budget, promised)
        if chosen and not budget.prompt_logprobs:  # those steps have a program of their own
            self._trim(chosen, budget.totals)
        return chosen

    def _trim(self, chosen: list[tuple[Request, int]], totals: list[int]) -> None:
        """Cut what is just above a bucket from the last chunk of each rank."""
        last = {request.rank: at for at, (request, _) in enumerate(chosen)}
        lasts = [chosen[last[rank]][1] if rank in last else 0 for rank in range(len(totals))]
        for rank, cut in enumerate(trim_to_bucket(totals, lasts, self._capacity.token_buckets)):
            if cut:
                request, length = chosen[last[rank]]
                chosen[last[rank]] = request, length - cut

    def _start_waiting(
        self,
        open_ranks: list[Rank],
        chosen: list[tuple[Request, int]],
        opens: list[SlotOpen],
        budget: PrefillBudget,
        promised: list[int],
    ) -> None:
        """Start waiting requests, in the order of the queue, as long as budget and pages of an open rank allow.

        `promised[i]` pages of those that are available on rank i are for chunks that are chosen already. One whose best
        rank has only no budget left in this step waits for the next: elsewhere its prefix would be computed again.
        """
        ranks = self._roster.ranks
        ratio = self._ratio.value
        expected = [reserved_tokens(rank.running, ratio) for rank in ranks]
        pending = [sum(r.num_fill_tokens - r.num_planned_tokens for r in rank.prefilling.values()) for rank in ranks]
        num_left = 0
        self.num_deferred = 0
        for waiting in self._roster.waiting.in_order():
            wants = waiting.needs_prompt_logprobs
            able = [rank for rank in open_ranks if rank.num_free_slots]
            if num_left > _MOST_LEFT or not any(budget.offer(r.index, prompt_logprobs=wants) > 0 for r in able):
                return
            for rank in by_cost(waiting, able, pending):
                index, cache, pool = rank.index, rank.cache, rank.pool
                if budget.offer(index, prompt_logprobs=wants) <= 0:
                    num_left += 1
                    break
                fill, reusable = waiting.fill_tokens, waiting.num_reusable_tokens
                node, pages = cache.match(waiting.namespace, fill, reusable)
                cached = (len(pages) + cache.num_absent(node)) * self._page_size
                if self._is_computed_by_another(waiting, fill, cached, rank, chosen):
                    self.num_deferred += 1
                    break
                cache.lock(node)
                needed = pool.pages_for(waiting.num_fill_tokens) - len(pages)  # also for what is loaded
                available = rank.num_available_pages - promised[index]
                reserved = math.ceil(expected[index] / self._page_size)
                alone = not (rank.prefilling or rank.decoding)
                if not may_start(needed, available, reserved, alone=alone):
                    cache.unlock(node)
                    continue
                length = min(waiting.num_fill_tokens - cached, budget.offer(index, prompt_logprobs=wants))
                opens.append(self._roster.start(waiting, rank, node, pages))
                budget.take(index, length, prompt_logprobs=wants)
                chosen.append((waiting, length))
                promised[index] += pool.pages_for(waiting.num_fill_tokens) - len(waiting.pages[0])
                expected[index] += reserved_tokens([waiting], ratio)
                pending[index] += waiting.num_fill_tokens - cached
                break
            else:
                return

    def _is_computed_by_another(
        self, request: Request, fill: list[int], cached: int, rank: Rank, chosen: list[tuple[Request, int]]
    ) -> bool:
        """Whether one that computes on this rank in this step has what comes next in `request`'s prompt: then its pages
        are shared from the next step on, and computing them twice would be a waste."""
        if not self._shares_prefixes:
            return False
        end = cached + max(_WORTH_WAITING, self._page_size) // self._page_size * self._page_size
        if end > request.num_reusable_tokens:
            return False
        return any(
            other.rank == rank.index
            and other.namespace == request.namespace
            and other.num_fill_tokens >= end
            and other.num_planned_tokens < end
            and other.tokens(cached, end) == fill[cached:end]
            and other.tokens(0, cached) == fill[:cached]
            for other, _ in chosen
        )

    def _prefill_chunk(self, request: Request, length: int) -> Chunk:
        """Plan the next `length` fill tokens of a request; with the last of them it draws its first new token."""
        rank = self._roster.ranks[request.rank]
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
            rank=rank.index,
            start=start,
            length=length,
            tokens=request.tokens(start, end),
            new_pages=rank.extend(request, end),
            logits=length if wants else int(samples),
            sample=samples,
            target=request.prompt_ids[end] if wants and end < request.num_prompt_tokens else None,
        )
        request.num_planned_tokens = end
        request.num_planned_outputs += samples
        rank.cache_prompt(request)
        if is_last:
            rank.promote(request, last=request.num_planned_outputs >= request.max_new_tokens)
        return chunk
