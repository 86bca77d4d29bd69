"""The table of open requests: each one waits in the queue or runs on one of the ranks.

It owns the requests by id, the queue that all ranks share, and the ranks. It decides nothing: the scheduler and the
planner decide which request moves, when, and to which rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from jaxserve.engine.kv_cache.prefix_windows import HeldWindow
from jaxserve.engine.kv_cache.radix_node import RadixNode
from jaxserve.engine.scheduling.policy import WaitingQueue
from jaxserve.engine.scheduling.rank import Rank
from jaxserve.engine.scheduling.request import Phase, Request
from jaxserve.step_plan import SlotOpen


class RequestTable:
    """Open requests by id. A request that doesn't wait runs on the rank `Request.rank`.

    Pooled requests wait in a queue of their own, `pooled_waiting`.
    """

    def __init__(self, ranks: Sequence[Rank], waiting: WaitingQueue, pooled_waiting: WaitingQueue) -> None:
        self.ranks = tuple(ranks)
        self.waiting = waiting
        self.pooled_waiting = pooled_waiting
        self.requests: dict[str, Request] = {}
        self.num_finished = 0

    @property
    def running(self) -> Iterator[Request]:
        """The requests of all ranks that still have tokens to plan."""
        for rank in self.ranks:
            yield from rank.running

    @property
    def num_waiting(self) -> int:
        """The number of requests in both queues."""
        return len(self.waiting) + len(self.pooled_waiting)

    @property
    def num_running(self) -> int:
        """The number of requests that hold a slot."""
        return sum(rank.num_running for rank in self.ranks)

    @property
    def num_free_slots(self) -> int:
        """The number of free slots on all ranks."""
        return sum(rank.num_free_slots for rank in self.ranks)

    @property
    def num_queued_tokens(self) -> int:
        """The number of tokens of prompts that no step computes yet. Cached ones count until their request starts."""
        partial = (request for rank in self.ranks for request in rank.prefilling.values())
        queued = self.waiting.num_tokens + self.pooled_waiting.num_tokens
        return queued + sum(r.num_fill_tokens - r.num_planned_tokens for r in partial)

    def add(self, request: Request) -> None:
        """Add a new request to the table and to the queue."""
        self.requests[request.request_id] = request
        self._queue(request).add(request)

    def start(
        self, request: Request, rank: Rank, node: RadixNode, pages: list[int], held: Sequence[HeldWindow] = ()
    ) -> SlotOpen:
        """Start a waiting request on a rank; see `Rank.start`."""
        self._queue(request).remove(request)
        return rank.start(request, node, pages, held)

    def retract(self, request: Request) -> None:
        """Stop a running request and put it back into the queue; it may start again on any rank."""
        self.ranks[request.rank].stop(request)
        request.reset_progress()
        self._queue(request).requeue(request)

    def finish(self, request: Request) -> None:
        """Remove a request that ends, whether it waits or runs."""
        if request.phase is Phase.WAITING:
            self._queue(request).remove(request)
        else:
            self.ranks[request.rank].stop(request)
        request.phase = Phase.FINISHED
        del self.requests[request.request_id]
        self.num_finished += 1

    def _queue(self, request: Request) -> WaitingQueue:
        return self.pooled_waiting if request.pooled else self.waiting

    def check(self) -> list[str]:
        """Return the inconsistencies found, as sentences; none if every page, slot and request is counted once."""
        problems = self._check_requests()
        for rank in self.ranks:
            where = f"on rank {rank.index}, " if len(self.ranks) > 1 else ""
            problems += [f"{where}{problem}" for problem in rank.check()]
        return problems

    def _check_requests(self) -> list[str]:
        problems = []
        ending = (request for rank in self.ranks for request in rank.finishing.values())
        listed = Counter(
            request.request_id for request in [*self.running, *ending, *self.waiting, *self.pooled_waiting]
        )
        for request_id in listed.keys() | self.requests.keys():
            if listed[request_id] != 1 or request_id not in self.requests:
                known = "open" if request_id in self.requests else "not open"
                problems.append(f"request {request_id} is {known} and listed {listed[request_id]} times")
        for queue in (self.waiting, self.pooled_waiting):
            tokens = sum(request.num_fill_tokens for request in queue)
            if tokens != queue.num_tokens:
                problems.append(f"{tokens} tokens wait and {queue.num_tokens} are counted")
        for request in (*self.waiting, *self.pooled_waiting):
            if request.phase is not Phase.WAITING or request.slot is not None or request.pages[0] or request.node:
                problems.append(f"waiting request {request.request_id} is {request.phase} or holds a slot or pages")
        return problems
