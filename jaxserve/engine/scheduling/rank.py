"""One data-parallel rank: its slots, pages, prefix cache and the requests that run on it.

Ranks share nothing: slots and pages are numbers local to one, a prefix that one has cached is no use to another, and a
request stays where it started until it ends or is retracted. A rank hands out what it has and takes it back, so that
each slot and page is free, cached or owned exactly once; `check` says so at any moment between two steps. Which request
comes to which rank, and who moves when, it never decides.

Who holds what: a running request owns a slot and pages, and has locked the cached prefix it reads. Whole pages of its
prompt go to the cache as soon as the step that writes them is planned, those of its output when it stops running. It
gives all back when it ends, when it is retracted, or once its last token is planned and a next step is made: steps run
in order, so whoever gets them then comes after it.
"""

from __future__ import annotations

from collections import Counter

from jaxserve.engine.kv_cache.page_pool import PagePool
from jaxserve.engine.kv_cache.radix_cache import RadixCache
from jaxserve.engine.kv_cache.radix_node import Node
from jaxserve.engine.scheduling.request import Phase, Request
from jaxserve.step_plan import Capacity, SlotOpen


class Rank:
    """The requests that run on it, by id. Each is in exactly one of `prefilling` (some fill tokens are unplanned),
    `decoding`, and `finishing` (its last token is planned); each keeps the order in which they came in."""

    def __init__(self, index: int, capacity: Capacity, cache: RadixCache, pool: PagePool) -> None:
        self.index = index
        self.pool = pool
        self.cache = cache
        self.prefilling: dict[str, Request] = {}
        self.decoding: dict[str, Request] = {}
        self.finishing: dict[str, Request] = {}
        self.num_slots = capacity.num_slots
        self._free_slots = list(range(capacity.num_slots - 1, -1, -1))
        self._closed_slots: list[int] = []

    @property
    def running(self) -> list[Request]:
        """Those that have tokens to plan yet."""
        return [*self.prefilling.values(), *self.decoding.values()]

    @property
    def num_running(self) -> int:
        """Requests that hold a slot; one whose last token is on its way may have given it back."""
        ending = sum(request.slot is not None for request in self.finishing.values())
        return len(self.prefilling) + len(self.decoding) + ending

    @property
    def num_free_slots(self) -> int:
        """Requests that could start if there were pages."""
        return len(self._free_slots)

    @property
    def num_available_pages(self) -> int:
        """Pages that are free, or cached and used by nobody."""
        return self.pool.num_free + self.cache.num_evictable

    def start(self, request: Request, node: Node, pages: list[int]) -> SlotOpen:
        """A request takes a slot, and the cached prefix that ends at `node`, which the caller has locked for it:
        `pages`, and those into which the rest of it is loaded."""
        slot = self._free_slots.pop()
        if absent := self.cache.num_absent(node):
            loaded = self._allocate(absent)
            self.cache.load(node, loaded)
            pages = pages + loaded
        cached = len(pages) * self.pool.page_size
        request.rank = self.index
        request.slot = slot
        request.num_starts += 1
        request.phase = Phase.RUNNING
        request.node = node
        request.pages[0] = pages
        request.num_shared_pages = len(pages)
        request.num_planned_tokens = request.num_computed_tokens = cached
        if request.num_cached_tokens is None:
            request.num_cached_tokens = cached
        self.prefilling[request.request_id] = request
        return SlotOpen(
            slot=slot,
            rank=self.index,
            sampling=request.sampling,
            stop_ids=request.stop_ids,
            sample=request.sample,
            prompt_ids=request.prompt_ids,
            output_ids=list(request.output_ids),
            cached_pages=(tuple(pages),),
            num_cached_tokens=cached,
        )

    def extend(self, request: Request, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Give a request the pages that its first `num_tokens` tokens still lack, and return them by KV group."""
        pages = request.pages[0]
        count = self.pool.pages_for(num_tokens) - len(pages)
        if count <= 0:
            return ((),)
        new = self._allocate(count)
        pages.extend(new)
        return (tuple(new),)

    def cache_prompt(self, request: Request) -> None:
        """The whole pages of fill tokens that are planned go to the cache: later steps may read them."""
        shared, size = request.num_shared_pages, self.pool.page_size
        whole = request.num_planned_tokens // size
        if whole <= shared:
            return
        assert request.node is not None
        request.node, taken = self.cache.extend(
            request.node, request.tokens(shared * size, whole * size), request.pages[0][shared:whole]
        )
        request.num_shared_pages += taken

    def promote(self, request: Request, *, last: bool) -> None:
        """All fill tokens of a prefilling request, or with `last` the last token of a decoding one, are planned."""
        self.prefilling.pop(request.request_id, None) or self.decoding.pop(request.request_id)
        (self.finishing if last else self.decoding)[request.request_id] = request

    def stop(self, request: Request) -> None:
        """A request runs no more; the cache keeps what was computed for as long as it can."""
        self._give_back(request)
        for group in (self.prefilling, self.decoding, self.finishing):
            group.pop(request.request_id, None)

    def release_finishing(self) -> None:
        """Take slots and pages from requests whose last token was planned in an earlier step."""
        for request in self.finishing.values():
            self._give_back(request)

    def take_closed_slots(self, opens: list[SlotOpen]) -> list[tuple[int, int]]:
        """Slots that were freed since the last call and that none of `opens` takes again, as (rank, slot)."""
        if not self._closed_slots:
            return []
        reopened = {opened.slot for opened in opens if opened.rank == self.index}
        closed = [(self.index, slot) for slot in self._closed_slots if slot not in reopened]
        self._closed_slots.clear()
        return closed

    def check(self) -> list[str]:
        """What is wrong with slots, pages and cache, as sentences; empty when each is counted once."""
        requests = [*self.running, *self.finishing.values()]
        problems = self._check_requests(requests)
        slots = Counter(self._free_slots)
        slots.update(request.slot for request in requests if request.slot is not None)
        problems += [
            f"slot {slot} is free or owned {slots[slot]} times" for slot in range(self.num_slots) if slots[slot] != 1
        ]
        own = (page for request in requests for page in request.pages[0][request.num_shared_pages :])
        problems += self.cache.check([request.node for request in requests if request.node is not None])
        return problems + self.pool.check([*own, *self.cache.pages()])

    def _check_requests(self, requests: list[Request]) -> list[str]:
        problems = []
        for request in requests:
            if request.phase is not Phase.RUNNING or request.rank != self.index:
                problems.append(f"request {request.request_id} runs here, is {request.phase} on rank {request.rank}")
            if request.slot is None and (request.request_id not in self.finishing or request.pages[0] or request.node):
                problems.append(f"running request {request.request_id} has no slot")
            if request.slot is not None and len(request.pages[0]) != self.pool.pages_for(request.num_planned_tokens):
                problems.append(
                    f"request {request.request_id} holds {len(request.pages[0])} pages for "
                    f"{request.num_planned_tokens} tokens"
                )
        if len(self.prefilling) > 1:
            problems.append(f"{len(self.prefilling)} prompts are halfway at once: {', '.join(self.prefilling)}")
        return problems

    def _allocate(self, count: int) -> list[int]:
        """Free pages, or cached ones that nobody uses; the caller has made sure that there are as many."""
        if count > self.pool.num_free:
            self.cache.evict(count - self.pool.num_free)
        return self.pool.allocate(count)

    def _give_back(self, request: Request) -> None:
        if request.slot is None:
            return
        self._free_slots.append(request.slot)
        self._closed_slots.append(request.slot)
        request.slot = None
        pages, shared = request.pages[0], request.num_shared_pages
        # What is planned is written before anybody else's step; the tokens must be known, too, to be found again.
        whole = max(min(request.num_planned_tokens, request.num_known_tokens) // self.pool.page_size, shared)
        self.pool.release(pages[whole:])
        tokens = request.tokens(0, whole * self.pool.page_size)
        self.cache.adopt(request.namespace, tokens, pages[shared:whole], shared)
        assert request.node is not None
        self.cache.unlock(request.node)
        request.node = None
        request.num_shared_pages = 0
        request.pages[0] = []
