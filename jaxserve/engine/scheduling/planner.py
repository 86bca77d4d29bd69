"""Plans one step: all decodes first, then prompt chunks in the rest of the token budget.

It turns the running requests of the table into a `StepPlan`, starts waiting requests, and allocates the pages that each
chunk writes. A plan covers all data-parallel ranks, which step together; each rank has its own token budget and pages.
The scheduler retracts requests beforehand and processes the results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxserve.engine.kv_cache.prefix_windows import HeldWindow
from jaxserve.engine.scheduling.admission import NewTokenRatio, may_start, reserved_tokens
from jaxserve.engine.scheduling.budget import PrefillBudget, trim_to_bucket
from jaxserve.engine.scheduling.rank import Rank
from jaxserve.engine.scheduling.rank_router import rank_by_cost
from jaxserve.engine.scheduling.request import Request
from jaxserve.engine.scheduling.request_table import RequestTable
from jaxserve.errors import ConfigError
from jaxserve.step_plan import Capacity, Chunk, PageCopy, SlotOpen, StepPlan

# A shared prefix shorter than this is computed twice instead of deferring a request.
_MIN_SHARED_TOKENS = 32
# A step passes at most this many requests whose best rank has no budget left: each lookup queries every rank's cache.
_MAX_PASSED = 16


class Planner:
    """Plans within `capacity` and the limits of `Scheduler`. Raises `ConfigError` for limits below 1.

    `num_deferred` is how many waiting requests the last plan deferred because another request computes their prefix.
    """

    def __init__(
        self,
        table: RequestTable,
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
        self._table = table
        self._capacity = capacity
        self._page_size = capacity.page_size
        self._no_pages: tuple[tuple[int, ...], ...] = ((),) * len(capacity.pages_by_group)
        self._ratio = ratio
        self._shares_prefixes = shares_prefixes
        self.num_deferred = 0
        self._prefill_tokens = min(chunked_prefill_size, max_prefill_tokens)
        self._step_tokens = min(max_num_batched_tokens, capacity.token_buckets[-1])

    def next_step(self, *, admit: bool) -> tuple[StepPlan, list[Request]] | None:
        """Return the next step and the requests of its chunks, or None if there is no token to compute.

        With `admit`, waiting requests may start. There must be pages for all decodes: see `is_short_of_pages`.
        """
        table = self._table
        chunks: list[Chunk] = []
        requests: list[Request] = []
        opens: list[SlotOpen] = []
        greedy = True
        decodes = []
        for rank in table.ranks:
            rank.cache.tier.save_added()
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
            closes=table.take_closed_slots(opens),
            num_decodes=num_decodes,
            greedy=greedy,
        )
        return plan, requests

    def is_short_of_pages(self, rank: Rank) -> bool:
        """Return whether the rank lacks pages for its decodes, or if there are none, for its oldest prefill."""
        page_size = self._page_size
        if rank.decoding:
            # Usually there is a page for each request, so the exact count is not needed.
            if len(rank.decoding) <= rank.num_available_pages:
                return False
            waiting = [request for request in rank.decoding.values() if request.num_planned_tokens % page_size == 0]
        else:
            oldest = next(iter(rank.prefilling.values()), None)
            waiting = [oldest] if oldest is not None and oldest.num_planned_tokens % page_size == 0 else []
        if len(waiting) <= rank.num_available_pages:
            return False
        for request in waiting:
            rank.give_up_passed(request)
        return len(waiting) > rank.num_available_pages

    def can_start(self, request: Request, rank: Rank, *, freed: Sequence[Request] = ()) -> bool:
        """Return whether a rank has a slot and pages for a waiting request, now or with what others would free."""
        cache = rank.cache
        node, pages = cache.match(request.namespace, request.fill_tokens, request.num_reusable_tokens)
        cache.lock(node)
        held = cache.windows.hold(node)
        running = rank.running
        available = [
            count + sum(len(other.pages[group]) for other in freed)
            for group, count in enumerate(rank.available_pages())
        ]
        needed = self._pages_to_start(request, rank, len(pages), held)
        reserved = self._reserved_pages(rank.missing_window_pages(), reserved_tokens(running, self._ratio.value))
        starts = all(
            may_start(*pages, nothing_runs=not running) for pages in zip(needed, available, reserved, strict=True)
        )
        cache.windows.release(held)
        cache.unlock(node)
        return starts and (rank.num_free_slots > 0 or bool(freed))

    def _pages_to_start(self, request: Request, rank: Rank, num_resident: int, held: Sequence[HeldWindow]) -> list[int]:
        """Return how many more pages a waiting request needs, by KV group.

        `num_resident` pages of its cached prefix are on the device, and `held` of the windows before its end. Of a
        group with a window it needs at most a window and a chunk of the prompt at once.
        """
        total = rank.pool.pages_for(request.num_fill_tokens)
        needed = [total - num_resident]  # includes pages to load from the host
        for window, one in zip(rank.windows, held, strict=True):
            at_once = window.last_pages + 1 + rank.pool.pages_for(self._prefill_tokens)
            needed.append(max(0, min(total - one.first, at_once, window.num_pages) - one.num_resident))
        return needed

    def _reserved_pages(self, missing: Sequence[int], num_tokens: float) -> list[int]:
        """Return how many pages to keep, by KV group, for the tokens that running requests are expected to produce.

        Of the groups with a window they take at most the `missing` ones.
        """
        pages = math.ceil(num_tokens / self._page_size)
        return [pages, *(min(pages, most) for most in missing)]

    def _take_copies(self) -> tuple[list[PageCopy], list[PageCopy]]:
        """Return the saves and loads of all ranks."""
        saves: list[PageCopy] = []
        loads: list[PageCopy] = []
        for rank in self._table.ranks:
            saved, loaded = rank.cache.tier.take_copies()
            if saved or loaded:
                saves += [(group, rank.index, page, slot) for group, page, slot in saved]
                loads += [(group, rank.index, slot, page) for group, slot, page in loaded]
        return saves, loads

    def _plan_decodes(self, rank: Rank, chunks: list[Chunk], requests: list[Request]) -> bool:
        """Append a chunk for each decoding request of a rank; return whether all of them are greedy."""
        page_size, index, no_pages = self._page_size, rank.index, self._no_pages
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
                    new_pages=no_pages if position % page_size else rank.extend(request, position + 1),
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
            rank.advance(request, last=True)
        return greedy

    def _choose_prefills(
        self, num_decodes: list[int], opens: list[SlotOpen], *, admit: bool
    ) -> list[tuple[Request, int]]:
        """Choose prefill chunks: running prompts first, then new ones. Return each request with its chunk's length.

        Requests start in queue order; only one deferred for a shared prefix, or whose best rank has no budget left, may
        be passed. A chunk is shorter than the prompt's rest only if it uses up a budget or the pages. So each rank has
        at most one partly planned prompt, and two prompts never wait for each other's pages. If decodes take the pages
        a prompt needs, retraction frees others.
        """
        table = self._table
        partial = [request for rank in table.ranks for request in rank.prefilling.values()]
        admit = admit and bool(table.waiting) and any(rank.num_free_slots for rank in table.ranks)
        if not partial and not admit:
            return []
        budget = PrefillBudget(
            num_decodes,
            step_tokens=self._step_tokens,
            prefill_tokens=self._prefill_tokens,
            prompt_logprob_tokens=self._capacity.prompt_logprob_tokens,
        )
        chosen: list[tuple[Request, int]] = []
        promised = [[0] * len(self._no_pages) for _ in table.ranks]
        open_ranks = list(table.ranks)
        # The oldest first: a chunk with prompt log probabilities limits all chunks to a smaller program.
        for request in sorted(partial, key=lambda request: request.arrival) if len(partial) > 1 else partial:
            rank = table.ranks[request.rank]
            planned, held = request.num_planned_tokens, len(request.pages[0])
            wants = request.needs_prompt_logprobs
            room = (held + self._unpromised(rank, promised)) * self._page_size - planned
            length = min(request.num_fill_tokens - planned, room, budget.max_chunk(rank.index, prompt_logprobs=wants))
            if length <= 0:
                open_ranks.remove(rank)
                continue
            budget.add_chunk(rank.index, length, prompt_logprobs=wants)
            chosen.append((request, length))
            added = rank.pool.pages_for(planned + length) - held
            promised[rank.index] = [pages + added for pages in promised[rank.index]]
        if admit:
            self._start_waiting(open_ranks, chosen, opens, budget, promised)
        if chosen and not budget.prompt_logprobs:  # steps with prompt log probabilities run another program
            self._trim(chosen, budget.totals)
        return chosen

    def _unpromised(self, rank: Rank, promised: list[list[int]]) -> int:
        """Return how many more pages a chunk may take in each KV group of a rank."""
        return min(count - pages for count, pages in zip(rank.available_pages(), promised[rank.index]))

    def _trim(self, chosen: list[tuple[Request, int]], totals: list[int]) -> None:
        """Shorten the last chunk of each rank if the step then fits a smaller bucket; see `trim_to_bucket`."""
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
        promised: list[list[int]],
    ) -> None:
        """Start waiting requests in queue order, as long as an open rank has budget and pages.

        `promised[i]` of the available pages of rank i, by KV group, are needed by chunks chosen before. A request whose
        best rank only lacks budget in this step waits for the next step: another rank would compute its prefix again.
        """
        ranks = self._table.ranks
        ratio = self._ratio.value
        expected = [reserved_tokens(rank.running, ratio) for rank in ranks]
        pending = [sum(r.num_fill_tokens - r.num_planned_tokens for r in rank.prefilling.values()) for rank in ranks]
        missing = [rank.missing_window_pages() for rank in ranks]
        num_passed = 0
        self.num_deferred = 0
        for waiting in self._table.waiting.in_order():
            wants = waiting.needs_prompt_logprobs
            able = [rank for rank in open_ranks if rank.num_free_slots]
            if num_passed > _MAX_PASSED or not any(budget.max_chunk(r.index, prompt_logprobs=wants) > 0 for r in able):
                return
            for rank in rank_by_cost(waiting, able, pending):
                index, cache, pool = rank.index, rank.cache, rank.pool
                if budget.max_chunk(index, prompt_logprobs=wants) <= 0:
                    num_passed += 1
                    break
                fill, reusable = waiting.fill_tokens, waiting.num_reusable_tokens
                node, pages = cache.match(waiting.namespace, fill, reusable)
                cached = (len(pages) + cache.num_host_only(node)) * self._page_size
                if self._is_computed_by_another(waiting, fill, cached, rank, chosen):
                    self.num_deferred += 1
                    break
                cache.lock(node)
                held = cache.windows.hold(node)
                needed = self._pages_to_start(waiting, rank, len(pages), held)
                available = map(int.__sub__, rank.available_pages(), promised[index])
                reserved = self._reserved_pages(missing[index], expected[index])
                nothing_runs = not (rank.prefilling or rank.decoding)
                if not all(
                    may_start(*counts, nothing_runs=nothing_runs) for counts in zip(needed, available, reserved)
                ):
                    cache.windows.release(held)
                    cache.unlock(node)
                    continue
                opens.append(self._table.start(waiting, rank, node, pages, held))
                length = min(waiting.num_fill_tokens - cached, budget.max_chunk(index, prompt_logprobs=wants))
                if (room := self._unpromised(rank, promised) * self._page_size) < length:
                    length = room
                    open_ranks.remove(rank)
                budget.add_chunk(index, length, prompt_logprobs=wants)
                chosen.append((waiting, length))
                whole = pool.pages_for(waiting.num_fill_tokens) - len(waiting.pages[0])
                at_once = pool.pages_for(length)
                promised[index] = [
                    before + min(whole, at_once if group else whole) for group, before in enumerate(promised[index])
                ]
                expected[index] += reserved_tokens([waiting], ratio)
                pending[index] += waiting.num_fill_tokens - cached
                break
            else:
                return

    def _is_computed_by_another(
        self, request: Request, fill: list[int], cached: int, rank: Rank, chosen: list[tuple[Request, int]]
    ) -> bool:
        """Return whether another request on `rank` computes the next part of `request`'s prompt in this step.

        Then the pages can be shared from the next step on, instead of computing them twice.
        """
        if not self._shares_prefixes:
            return False
        end = cached + max(_MIN_SHARED_TOKENS, self._page_size) // self._page_size * self._page_size
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
        """Plan the next `length` fill tokens of a request; the last one also samples its first new token."""
        rank = self._table.ranks[request.rank]
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
            rank.advance(request, last=request.num_planned_outputs >= request.max_new_tokens)
        return chunk
