"""The books: every open request, where it stands, and which slot and pages it holds.

It moves requests between waiting, running and gone, and hands slots and pages out and takes them back, so that each is
free or owned exactly once; `check` says so at any moment between two steps. It decides nothing: who moves, and when, is
the scheduler's.

Who holds what: a running request owns a slot and pages. It gives them back when it ends, when it is retracted, or once
its last token is planned and a next step is made: steps run in order, so whoever gets them then comes after it.
"""

from __future__ import annotations

from collections import Counter

from jaxserve.engine.pages import PagePool
from jaxserve.engine.policy import WaitingQueue
from jaxserve.engine.request import Phase, Request
from jaxserve.step_plan import Capacity, SlotOpen


class Roster:
    """Open requests by id. A running one is in exactly one of `prefilling` (some fill tokens are unplanned),
    `decoding`, and `finishing` (its last token is planned); each keeps the order in which they came in."""

    def __init__(self, capacity: Capacity) -> None:
        self.pool = PagePool(capacity.num_pages, capacity.page_size)
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.prefilling: dict[str, Request] = {}
        self.decoding: dict[str, Request] = {}
        self.finishing: dict[str, Request] = {}
        self._num_slots = capacity.num_slots
        self._free_slots = list(range(capacity.num_slots - 1, -1, -1))
        self._closed_slots: list[int] = []

    @property
    def num_running(self) -> int:
        """Requests that have started and not ended."""
        return len(self.prefilling) + len(self.decoding) + len(self.finishing)

    @property
    def num_free_slots(self) -> int:
        """Requests that could start if there were pages."""
        return len(self._free_slots)

    def enter(self, request: Request) -> None:
        """A request arrives and waits."""
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def start(self, request: Request) -> SlotOpen:
        """The first waiting request takes a slot."""
        popped = self.waiting.pop()
        assert popped is request, "requests start in the order of the queue"
        slot = self._free_slots.pop()
        request.slot = slot
        request.phase = Phase.RUNNING
        self.prefilling[request.request_id] = request
        return SlotOpen(
            slot=slot,
            rank=request.rank,
            sampling=request.sampling,
            stop_ids=request.stop_ids,
            sample=request.sample,
            prompt_ids=request.prompt_ids,
            output_ids=list(request.output_ids),
        )

    def extend(self, request: Request, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Give a request the pages that its first `num_tokens` tokens still lack, and return them by KV group."""
        pages = request.pages[0]
        new = self.pool.allocate(self.pool.pages_for(num_tokens) - len(pages))
        pages.extend(new)
        return (tuple(new),)

    def promote(self, request: Request, *, last: bool) -> None:
        """All fill tokens of a prefilling request, or with `last` the last token of a decoding one, are planned."""
        self.prefilling.pop(request.request_id, None) or self.decoding.pop(request.request_id)
        (self.finishing if last else self.decoding)[request.request_id] = request

    def retract(self, request: Request) -> None:
        """A running request goes back to the front of the queue and loses what the device has computed for it."""
        self._stop_running(request)
        request.start_over()
        self.waiting.put_back(request)

    def leave(self, request: Request) -> None:
        """A request ends, wherever it stands."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        else:
            self._stop_running(request)
        request.phase = Phase.FINISHED
        del self.requests[request.request_id]

    def release_finishing(self) -> None:
        """Take slots and pages from requests whose last token was planned in an earlier step."""
        for request in self.finishing.values():
            self._give_back(request)

    def take_closed_slots(self, opens: list[SlotOpen]) -> list[int]:
        """Slots that were freed since the last call and that none of `opens` takes again."""
        if not self._closed_slots:
            return []
        reopened = {opened.slot for opened in opens}
        closed = [slot for slot in self._closed_slots if slot not in reopened]
        self._closed_slots.clear()
        return closed

    def check(self) -> list[str]:
        """What is wrong with the books, as sentences; empty when every page, slot and request is counted once."""
        problems = []
        running = [*self.prefilling.values(), *self.decoding.values(), *self.finishing.values()]
        listed = Counter(request.request_id for request in [*running, *self.waiting])
        for request_id in listed.keys() | self.requests.keys():
            if listed[request_id] != 1 or request_id not in self.requests:
                known = "open" if request_id in self.requests else "not open"
                problems.append(f"request {request_id} is {known} and listed {listed[request_id]} times")
        for request in self.waiting:
            if request.phase is not Phase.WAITING or request.slot is not None or any(request.pages):
                problems.append(f"waiting request {request.request_id} is {request.phase} or holds a slot or pages")
        for request in running:
            if request.phase is not Phase.RUNNING:
                problems.append(f"running request {request.request_id} is {request.phase}")
            if request.slot is None and (request.request_id not in self.finishing or any(request.pages)):
                problems.append(f"running request {request.request_id} has no slot")
            if request.slot is not None and len(request.pages[0]) != self.pool.pages_for(request.num_planned_tokens):
                problems.append(
                    f"request {request.request_id} holds {len(request.pages[0])} pages for "
                    f"{request.num_planned_tokens} tokens"
                )
        if len(self.prefilling) > 1:
            problems.append(f"{len(self.prefilling)} prompts are halfway at once: {', '.join(self.prefilling)}")
        slots = Counter(self._free_slots)
        slots.update(request.slot for request in running if request.slot is not None)
        for slot in range(self._num_slots):
            if slots[slot] != 1:
                problems.append(f"slot {slot} is free or owned {slots[slot]} times")
        owned = [page for request in self.requests.values() for group in request.pages for page in group]
        return problems + self.pool.check(owned)

    def _stop_running(self, request: Request) -> None:
        self._give_back(request)
        for group in (self.prefilling, self.decoding, self.finishing):
            group.pop(request.request_id, None)

    def _give_back(self, request: Request) -> None:
        if request.slot is None:
            return
        self._free_slots.append(request.slot)
        self._closed_slots.append(request.slot)
        request.slot = None
        for pages in request.pages:
            self.pool.release(pages)
            pages.clear()
