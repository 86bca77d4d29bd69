"""Retracts running requests: when pages are short, for one of higher priority, or when their rotation no longer holds.

A retracted request frees its slot and pages and goes back to the queue; the cache keeps its whole pages while it can.
"""

from __future__ import annotations

import logging

from jaxserve.api_types import FinishReason, TokenEvent
from jaxserve.engine.scheduling.admission import NewTokenRatio, pool_exhausted_error
from jaxserve.engine.scheduling.planner import Planner
from jaxserve.engine.scheduling.policy import choose_victim
from jaxserve.engine.scheduling.priorities import Priorities
from jaxserve.engine.scheduling.request_table import RequestTable
from jaxserve.engine.scheduling.scheduler_stats import SchedulerStats
from jaxserve.step_plan import Capacity

logger = logging.getLogger("jaxserve.engine")


class Retraction:
    """Retracts requests of `table` in the order of `choose_victim`, with or without regard to their priority.

    With `preempts`, it also retracts them for waiting ones, as `priorities` say.
    """

    def __init__(
        self,
        table: RequestTable,
        planner: Planner,
        ratio: NewTokenRatio,
        stats: SchedulerStats,
        capacity: Capacity,
        *,
        by_priority: bool,
        preempts: bool,
        priorities: Priorities,
    ) -> None:
        self._table = table
        self._planner = planner
        self._ratio = ratio
        self._stats = stats
        self._capacity = capacity
        self._by_priority = by_priority
        self._threshold = priorities.threshold if preempts else None
        self._priorities = priorities

    def retract(self, events: list[TokenEvent], *, in_flight: bool) -> int | None:
        """Prepare the next step; return how many requests were retracted because pages were short.

        Return None if a step `in_flight` must be committed first. A request that needs more than the whole KV cache
        ends, and its last event is added to `events`.
        """
        num_retracted = self._restart_grown(in_flight=in_flight)
        if num_retracted == 0:
            num_retracted = self._make_room(events, in_flight=in_flight)
        if num_retracted == 0:
            num_retracted = self._preempt_for_priority(in_flight=in_flight)
        return num_retracted

    def _restart_grown(self, *, in_flight: bool) -> int | None:
        """Retract sequences that are about to grow past the length up to which their rotation holds.

        They start again with all their tokens rotated otherwise. Return 0, as no memory is short, or None if a step in
        flight must be committed first, which makes all their tokens known.
        """
        length = self._capacity.rotation_length
        if length is None:
            return 0
        # With a grammar, the next token can be known long after those before it, or together with others
        grown = [
            request
            for rank in self._table.ranks
            for request in rank.decoding.values()
            if (request.num_planned_tokens + 1 if request.grammar is None else request.num_known_tokens) > length
            and not request.is_long
        ]
        if grown and in_flight:
            return None
        for request in grown:
            self._table.retract(request)
        if grown:
            logger.info("sequences that grow past %d tokens are computed again (longrope): %d", length, len(grown))
        return 0

    def _make_room(self, events: list[TokenEvent], *, in_flight: bool) -> int | None:
        """Retract requests until the others have pages for their next step; return how many were retracted.

        Return None if a step in flight must be committed first: it may end requests and so free pages, and it makes all
        tokens of a victim known.
        """
        table = self._table
        num_retracted = 0
        for rank in table.ranks:
            while self._planner.is_short_of_pages(rank):
                if in_flight:
                    return None
                running = rank.running
                if len(running) == 1:
                    (request,) = running
                    table.finish(request)
                    error = pool_exhausted_error(request.num_known_tokens, self._capacity)
                    events.append(request.last_event(FinishReason.ERROR, [], error=error))
                else:
                    table.retract(choose_victim(running, by_priority=self._by_priority))
                    num_retracted += 1
        if num_retracted:
            self._stats.num_retractions += num_retracted
            before = self._ratio.value
            self._ratio.set_from_survivors(list(table.running))
            logger.warning(
                "decode out of memory happened, #retracted_reqs: %d, #new_token_ratio: %.4f -> %.4f, "
                "#running-req: %d, #queue-req: %d, total_cumulative_preemption_cnt: %d",
                num_retracted,
                before,
                self._ratio.value,
                table.num_running,
                table.num_waiting,
                self._stats.num_preemptions,
            )
        return num_retracted

    def _preempt_for_priority(self, *, in_flight: bool) -> int | None:
        """Retract requests of lower priority if the first waiting request that generates can't start otherwise.

        Return 0, as the retracted requests stand behind it in the queue, so that it may start in the same plan. Return
        None if a step in flight must be committed first.
        """
        table, threshold = self._table, self._threshold
        if threshold is None:
            return 0
        first = next(table.waiting.in_order(), None)
        if first is None or any(self._planner.prefills.can_start(first, rank) for rank in table.ranks):
            return 0
        for rank in table.ranks:
            lower = [request for request in rank.running if first.priority - request.priority > threshold]
            if lower and self._planner.prefills.can_start(first, rank, freed=lower):
                break
        else:
            return 0
        if in_flight:
            return None
        num_retracted = 0
        while lower and not self._planner.prefills.can_start(first, rank):
            victim = choose_victim(lower, by_priority=True)
            lower.remove(victim)
            table.retract(victim)
            num_retracted += 1
        self._stats.num_priority_preemptions += num_retracted
        logger.info(
            "preempted %d running requests for one of priority %d, #running-req: %d, #queue-req: %d, "
            "total_cumulative_preemption_cnt: %d",
            num_retracted,
            self._priorities.turned(first.priority),
            table.num_running,
            table.num_waiting,
            self._stats.num_preemptions,
        )
        return 0
