"""Chooses the prompt chunks of a step: running prompts first, then waiting requests, which it starts.

A choice stays within each rank's token budget and pages. The planner then allocates the pages and makes the chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxserve.engine.kv_cache.prefix_windows import HeldWindow
from jaxserve.engine.scheduling.admission import NewTokenRatio, may_start, reserved_tokens
from jaxserve.engine.scheduling.budget import PrefillBudget, trim_to_bucket
from jaxserve.engine.scheduling.policy import WaitingQueue
from jaxserve.engine.scheduling.pooled_share import PooledShare
from jaxserve.engine.scheduling.rank import Rank
from jaxserve.engine.scheduling.rank_router import rank_by_cost
from jaxserve.engine.scheduling.request import Request
from jaxserve.engine.scheduling.request_table import RequestTable
from jaxserve.engine.scheduling.step_times import StepTimes
from jaxserve.step_plan import Capacity, SlotOpen

# A shared prefix shorter than this is computed twice instead of deferring a request.
_MIN_SHARED_TOKENS = 32
# A step passes at most this many requests whose best rank has no budget left: each lookup queries every rank's cache.
_MAX_PASSED = 16


class PrefillChooser:
    """Chooses chunks of at most `prefill_tokens` together on each rank, in steps of at most `step_tokens`.

    They are those of at most `max_requests` requests on each rank, if it isn't None.
    While requests decode, a step with a part of a prompt that takes several steps has at most as many tokens as it
    computes in `mixed_step_seconds`, by the measured `times`; 0 is no limit. While others are open, `pooled_share`
    bounds the tokens of pooled requests, and `long_prompt_tokens` those of one prompt; 0 is no limit. `num_deferred` is
    how many waiting requests the last choice deferred because another request computes their prefix.
    """

    def __init__(
        self,
        table: RequestTable,
        capacity: Capacity,
        *,
        prefill_tokens: int,
        step_tokens: int,
        max_requests: int | None,
        ratio: NewTokenRatio,
        long_prompt_tokens: int,
        shares_prefixes: bool,
        times: StepTimes,
        mixed_step_seconds: float,
        pooled_share: PooledShare,
    ) -> None:
        self.num_deferred = 0
        self._times = times
        self._pooled_share = pooled_share
        self._mixed_step_seconds = mixed_step_seconds
        self._table = table
        self._capacity = capacity
        self._page_size = capacity.page_size
        self._prefill_tokens = prefill_tokens
        self._step_tokens = step_tokens
        self._max_requests = max_requests
        self._ratio = ratio
        self._long_prompt_tokens = long_prompt_tokens
        self._shares_prefixes = shares_prefixes

    def choose(self, num_decodes: Sequence[int], opens: list[SlotOpen], *, admit: bool) -> list[tuple[Request, int]]:
        """Return the requests that get a chunk in a step with `num_decodes[i]` decodes on rank i, and its length.

        With `admit`, waiting requests may start, which adds to `opens`. They start in queue order; only one deferred
        for a shared prefix, or whose best rank has no budget left, may be passed. A chunk is shorter than the prompt's
        rest only if it uses up a budget or the pages. So each rank has at most one partly planned prompt, and one of a
        pooled request, and two prompts never wait for each other's pages. With a limit of one prompt's tokens there are
        several, and a request starts only if there are pages for the rest of all. If decodes take the pages a prompt
        needs, retraction frees others.

        While others are open, pooled requests have their share of the time, and are chosen first. Without that limit
        they come last. If nothing else can run, they have all of it.
        """
        table = self._table
        partial = [request for rank in table.ranks for request in rank.prefilling.values()]
        admit = admit and table.num_waiting > 0 and any(rank.num_free_slots for rank in table.ranks)
        if not partial and not admit:
            return []
        shared = self._shares_time(num_decodes, partial)
        budget = PrefillBudget(
            num_decodes,
            step_tokens=self._step_tokens,
            prefill_tokens=self._prefill_tokens,
            prompt_logprob_tokens=self._capacity.prompt_logprob_tokens,
            pooled_tokens=self._pooled_tokens(num_decodes, partial) if shared else None,
            max_requests=self._max_requests,
        )
        chosen: list[tuple[Request, int]] = []
        promised = [[0] * len(self._capacity.pages_by_group) for _ in table.ranks]
        self.num_deferred = 0

        def choose_of(*, pooled: bool) -> None:
            queue, open_ranks = table.pooled_waiting if pooled else table.waiting, list(table.ranks)
            own = [request for request in partial if request.pooled == pooled]
            self._continue(own, open_ranks, chosen, budget, promised)
            if admit and queue and not (pooled and budget.is_out_of_pooled):  # to order the queue takes time
                self._start_waiting(queue, open_ranks, chosen, opens, budget, promised)

        for pooled in (True, False) if shared else (False, True):
            choose_of(pooled=pooled)
        if shared and not chosen and not any(num_decodes) and not any(rank.decoding for rank in table.ranks):
            budget.lift_pooled()
            choose_of(pooled=True)
        elif shared:
            self._count_time(num_decodes, chosen)
        if chosen and not budget.prompt_logprobs:  # steps with prompt log probabilities run another program
            self._trim(chosen, budget.totals)
        return chosen

    def _continue(
        self,
        partial: list[Request],
        open_ranks: list[Rank],
        chosen: list[tuple[Request, int]],
        budget: PrefillBudget,
        promised: list[list[int]],
    ) -> None:
        """Choose chunks of prompts that are partly planned; a rank whose prompt is still not complete is closed."""
        # The oldest first: a chunk with prompt log probabilities limits all chunks to a smaller program.
        for request in sorted(partial, key=lambda request: request.arrival) if len(partial) > 1 else partial:
            rank = self._table.ranks[request.rank]
            planned, held = request.num_planned_tokens, len(request.pages[0])
            self._limit(budget, rank, request.num_fill_tokens - (request.num_cached_tokens or 0))
            room = (held + self._unpromised(rank, promised)) * self._page_size - planned
            length = min(request.num_fill_tokens - planned, self._prompt_limit, room)
            length = min(length, budget.max_chunk(rank.index, **_kind(request)))
            cut = _state_cut(request, length) if length > 0 else 0
            if rank in open_ranks and (cut < length or length <= 0):
                open_ranks.remove(rank)
            if (length := cut) == 0:
                continue
            budget.add_chunk(rank.index, length, **_kind(request))
            chosen.append((request, length))
            added = rank.pool.pages_for(planned + length) - held
            promised[rank.index] = [pages + added for pages in promised[rank.index]]

    def _shares_time(self, num_decodes: Sequence[int], partial: list[Request]) -> bool:
        """Return whether pooled requests and others are open."""
        table = self._table
        num_pooled = len(table.pooled_waiting) + sum(request.pooled for request in partial)
        others = len(table.waiting) > 0 or len(partial) > sum(request.pooled for request in partial)
        others = others or any(num_decodes) or any(rank.decoding for rank in table.ranks)
        return num_pooled > 0 and others and self._pooled_share.is_limited

    def _pooled_tokens(self, num_decodes: Sequence[int], partial: list[Request]) -> int:
        """Return how many tokens of pooled requests the step may have on each rank."""
        rests = [request.num_fill_tokens - request.num_planned_tokens for request in partial if request.pooled]
        return self._pooled_share.tokens(num_decodes, sum(rests) + self._table.pooled_waiting.num_tokens)

    def _count_time(self, num_decodes: Sequence[int], chosen: list[tuple[Request, int]]) -> None:
        """Count the tokens of pooled requests and of others in a step."""
        tokens = {pooled: [0] * len(self._table.ranks) for pooled in (True, False)}
        for request, length in chosen:
            tokens[request.pooled][request.rank] += length
        self._pooled_share.count(num_decodes, max(tokens[False]), max(tokens[True]))

    def _limit(self, budget: PrefillBudget, rank: Rank, num_tokens: int) -> None:
        """Reduce the budget of a step for a prompt that takes several steps, while others decode."""
        takes_several = self._mixed_step_seconds > 0 and num_tokens > min(self._prefill_tokens, self._prompt_limit)
        if takes_several and any(other.decoding for other in self._table.ranks):
            budget.limit(rank.index, self._times.most_tokens(self._mixed_step_seconds))

    @property
    def _prompt_limit(self) -> int:
        """The most tokens of one prompt in a step. A request that is alone has the whole step."""
        if not self._long_prompt_tokens:
            return self._step_tokens
        num_open = self._table.num_waiting + sum(len(rank.running) for rank in self._table.ranks)
        return self._long_prompt_tokens if num_open > 1 else self._step_tokens

    def _expected_tokens(self, rank: Rank, chosen: Sequence[tuple[Request, int]] = ()) -> float:
        """Return how many more tokens running requests are expected to need pages for, beside those `chosen`.

        Rests of prompts count if there may be several: each is sure of its pages before another request starts.
        """
        rests = 0
        if self._long_prompt_tokens:
            rests = sum(request.num_fill_tokens - request.num_planned_tokens for request in rank.prefilling.values())
            rests -= sum(length for request, length in chosen if request.rank == rank.index)
        return rests + reserved_tokens(rank.running, self._ratio.value)

    def check(self) -> list[str]:
        """Return a sentence if more prompts of a rank are partly planned than may be."""
        partly = [(rank.index, request.pooled) for rank in self._table.ranks for request in rank.prefilling.values()]
        if self._long_prompt_tokens or len(set(partly)) == len(partly):
            return []
        return [f"several prompts of a rank are partly planned (rank, pooled): {partly}"]

    def can_start(self, request: Request, rank: Rank, *, freed: Sequence[Request] = ()) -> bool:
        """Return whether a rank has a slot and pages for a waiting request, now or with what others would free."""
        if not (self._has_slot(rank) or freed):
            return False
        cache = rank.cache
        node, pages = cache.match(request.namespace, request.fill_tokens, request.num_reusable_tokens)
        cache.lock(node)
        held = cache.windows.hold(node)
        available = [
            count + sum(len(other.pages[group]) for other in freed)
            for group, count in enumerate(rank.available_pages())
        ]
        expected = self._expected_tokens(rank)
        fits = self._fits(request, rank, len(pages), held, available, expected, rank.missing_window_pages())
        cache.windows.release(held)
        cache.unlock(node)
        return fits

    def _start_waiting(
        self,
        queue: WaitingQueue,
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
        expected = [self._expected_tokens(rank, chosen) for rank in ranks]
        pending = [sum(r.num_fill_tokens - r.num_planned_tokens for r in rank.prefilling.values()) for rank in ranks]
        missing = [rank.missing_window_pages() for rank in ranks]
        num_passed = 0
        for waiting in queue.in_order():
            kind = _kind(waiting)
            able = [rank for rank in open_ranks if self._has_slot(rank)]
            if num_passed > _MAX_PASSED or not any(budget.max_chunk(rank.index, **kind) > 0 for rank in able):
                return
            for rank in rank_by_cost(waiting, able, pending):
                index, cache, pool = rank.index, rank.cache, rank.pool
                if budget.max_chunk(index, **kind) <= 0:
                    num_passed += 1
                    break
                fill, reusable = waiting.fill_tokens, waiting.num_reusable_tokens
                node, pages = cache.match(waiting.namespace, fill, reusable)
                matched = (len(pages) + cache.num_host_only(node)) * self._page_size
                cached = matched if cache.states is None else cache.states.before(node)[1]
                if self._is_computed_by_another(waiting, fill, cached, rank, chosen):
                    self.num_deferred += 1
                    break
                cache.lock(node)
                held = cache.windows.hold(node)
                available = list(map(int.__sub__, rank.available_pages(), promised[index]))
                if not self._fits(waiting, rank, len(pages), held, available, expected[index], missing[index]):
                    cache.windows.release(held)
                    cache.unlock(node)
                    continue
                opens.append(self._table.start(waiting, rank, node, pages, held))
                self._limit(budget, rank, waiting.num_fill_tokens - cached)
                length = min(waiting.num_fill_tokens - cached, self._prompt_limit, budget.max_chunk(index, **kind))
                room = self._unpromised(rank, promised) * self._page_size + matched - cached
                if (most := min(room, _state_cut(waiting, length))) < length:
                    length = most
                    open_ranks.remove(rank)
                budget.add_chunk(index, length, **kind)
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

    def _fits(
        self,
        request: Request,
        rank: Rank,
        num_resident: int,
        held: Sequence[HeldWindow],
        available: Sequence[int],
        expected_tokens: float,
        missing: Sequence[int],
    ) -> bool:
        """Return whether the `available` pages of each KV group are enough to start a waiting request.

        `num_resident` pages of its cached prefix are on the device, and `held` of the windows before its end. Running
        requests are expected to produce `expected_tokens`, and lack the `missing` pages to whole windows. Of a group
        with a window, the request needs at most a window and a chunk of its prompt at once.
        """
        pool, nothing_runs = rank.pool, not (rank.prefilling or rank.decoding)
        total, reserved = pool.pages_for(request.num_fill_tokens), math.ceil(expected_tokens / self._page_size)
        # The first group's pages include those to load from the host.
        if not may_start(total - num_resident, available[0], reserved, nothing_runs=nothing_runs):
            return False
        for window, one, count, most in zip(rank.windows, held, available[1:], missing, strict=True):
            at_once = window.last_pages + 1 + pool.pages_for(self._prefill_tokens)
            needed = max(0, min(total - one.first, at_once, window.num_pages) - one.num_resident)
            if not may_start(needed, count, min(reserved, most), nothing_runs=nothing_runs):
                return False
        return True

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

    def _has_slot(self, rank: Rank) -> bool:
        """Return whether a rank has a slot for a waiting request, and if the model has states, a row."""
        return rank.num_free_slots > 0 and (rank.states is None or rank.states.num_available > 0)

    def _is_computed_by_another(
        self, request: Request, fill: list[int], cached: int, rank: Rank, chosen: list[tuple[Request, int]]
    ) -> bool:
        """Return whether another request on `rank` computes the next part of `request`'s prompt in this step.

        Then the pages can be shared from the next step on, instead of computing them twice. In a model with states, the
        other request leaves a snapshot, in this step or a later one.
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
            and (rank.states is not None or other.num_planned_tokens < end)
            and other.tokens(cached, end) == fill[cached:end]
            and other.tokens(0, cached) == fill[:cached]
            and (rank.states is None or rank.states.expect_snapshot(other, fill[: request.num_reusable_tokens], end))
            for other, _ in chosen
        )


def _kind(request: Request) -> dict[str, bool]:
    """Return what the budget of a chunk depends on."""
    return {"prompt_logprobs": request.needs_prompt_logprobs, "pooled": request.pooled}


def _state_cut(request: Request, length: int) -> int:
    """Return how long the next chunk of a prompt may be: it takes one snapshot of the state, at most."""
    if request.state is None:
        return length
    planned = request.num_planned_tokens
    due = request.state.due_in(planned, planned + length)
    return due[0] - planned if len(due) > 1 else length
