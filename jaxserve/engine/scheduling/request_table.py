"""The books: every open request and where it stands, waiting, running on one of the ranks, or gone.

It owns the list of open requests, the queue, which all ranks share, and the ranks. It decides nothing: who moves, when,
and to which rank, is the scheduler's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from jaxserve.engine.kv_cache.radix_node import Node
from jaxserve.engine.scheduling.policy import WaitingQueue
from jaxserve.engine.scheduling.rank import Rank
from jaxserve.engine.scheduling.request import Phase, Request
from jaxserve.step_plan import SlotOpen


class Roster:
    """Open requests by id; those that don't wait run on the rank that they name."""

    def __init__(self, ranks: Sequence[Rank], waiting: WaitingQueue) -> None:
        self.ranks = tuple(ranks)
        self.waiting = waiting
        self.requests: dict[str, Request] = {}

    @property
    def running(self) -> Iterator[Request]:
        """Those that have tokens to plan yet, on all ranks."""
        for rank in self.ranks:
            yield from rank.running

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return sum(rank.num_running for rank in self.ranks)

    @property
    def num_free_slots(self) -> int:
        """Requests that could start if there were pages."""
        return sum(rank.num_free_slots for rank in self.ranks)

    def enter(self, request: Request) -> None:
        """A request arrives and waits."""
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def start(self, request: Request, rank: Rank, node: Node, pages: list[int]) -> SlotOpen:
        """A waiting request starts on a rank; see `Rank.start`."""
        self.waiting.remove(request)
        return rank.start(request, node, pages)

    def retract(self, request: Request) -> None:
        """A running request goes back to the queue; it may start again on any rank."""
        self.ranks[request.rank].stop(request)
        request.start_over()
        self.waiting.put_back(request)

    def leave(self, request: Request) -> None:
        """A request ends, wherever it stands."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        else:
            self.ranks[request.rank].stop(request)
        request.phase = Phase.FINISHED
        del self.requests[request.request_id]

    def take_closed_slots(self, opens: list[SlotOpen]) -> list[tuple[int, int]]:
        """Slots that were freed since the last call and that none of `opens` takes again, as (rank, slot)."""
        return [closed for rank in self.ranks for closed in rank.take_closed_slots(opens)]

    def check(self) -> list[str]:
        """What is wrong with the books, as sentences; empty when every page, slot and request is counted once."""
        problems = self._check_requests()
        for rank in self.ranks:
            where = f"on rank {rank.index}, " if len(self.ranks) > 1 else ""
            problems += [f"{where}{problem}" for problem in rank.check()]
        return problems

    def _check_requests(self) -> list[str]:
        problems = []
        ending = (request for rank in self.ranks for request in rank.finishing.values())
        listed = Counter(request.request_id for request in [*self.running, *ending, *self.waiting])
        for request_id in listed.keys() | self.requests.keys():
            if listed[request_id] != 1 or request_id not in self.requests:
                known = "open" if request_id in self.requests else "not open"
                problems.append(f"request {request_id} is {known} and listed {listed[request_id]} times")
        for request in self.waiting:
            if request.phase is not Phase.WAITING or request.slot is not None or request.pages[0] or request.node:
                problems.append(f"waiting request {request.request_id} is {request.phase} or holds a slot or pages")
        return problems
