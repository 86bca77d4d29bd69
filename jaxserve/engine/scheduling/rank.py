"""One data-parallel rank: its slots, pages, prefix cache and the requests that run on it.

Ranks share nothing: slot and page numbers are local to a rank, a prefix cached on one is useless to another, and a
request stays on its rank until it ends or is retracted. A rank allocates and frees, so that each slot and page is free,
cached or owned exactly once; `check` verifies this at any moment between two steps. The planner and the scheduler
decide which request runs on which rank, and when.

Ownership: a running request owns a slot and pages, and has locked the cached prefix it reads. Whole pages of its prompt
go to the cache as soon as the step that writes them is planned, whole pages of its output when it stops running. The
request frees everything when it ends, when it is retracted, or when its last token is planned and the next step is
made: steps run in order, so the next owner's step runs after it. Pages of a KV group with a window are freed as soon as
no later query of the request sees them. `request_states` decides about rows of states.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from jaxserve.engine.kv_cache.page_pool import PagePool
from jaxserve.engine.kv_cache.prefix_windows import HeldWindow
from jaxserve.engine.kv_cache.radix_cache import RadixCache
from jaxserve.engine.kv_cache.radix_node import RadixNode
from jaxserve.engine.kv_cache.window_pages import WindowRun
from jaxserve.engine.scheduling.request import Phase, Request
from jaxserve.engine.scheduling.request_states import RequestStates
from jaxserve.step_plan import Capacity, SlotOpen


class Rank:
    """The slots, pages, cache and running requests of one rank.

    Each request is in exactly one of the dictionaries `prefilling` (some fill tokens are unplanned), `decoding`, and
    `finishing` (its last token is planned), by id and in the order of entry. `states` is None unless the model keeps a
    state for each sequence.
    """

    def __init__(
        self,
        index: int,
        capacity: Capacity,
        cache: RadixCache,
        pool: PagePool,
        states: RequestStates | None = None,
    ) -> None:
        self.index = index
        self.pool = pool
        self.cache = cache
        self.states = states
        self.windows = cache.windows.groups
        self._no_pages: tuple[tuple[int, ...], ...] = ((),) * (1 + len(self.windows))
        self._filled: list[Request] = []
        self.prefilling: dict[str, Request] = {}
        self.decoding: dict[str, Request] = {}
        self.finishing: dict[str, Request] = {}
        self.num_slots = capacity.num_slots
        # The slot that was freed first is used next: drafts are made from the tokens of slots until they are used
        # again.
        self._free_slots = deque(range(capacity.num_slots))

    @property
    def running(self) -> list[Request]:
        """The requests that still have tokens to plan."""
        return [*self.prefilling.values(), *self.decoding.values()]

    @property
    def num_running(self) -> int:
        """The number of requests that hold a slot; a finishing request may have freed its slot already."""
        ending = sum(request.slot is not None for request in self.finishing.values())
        return len(self.prefilling) + len(self.decoding) + ending

    @property
    def num_free_slots(self) -> int:
        """The number of free slots."""
        return len(self._free_slots)

    @property
    def num_available_pages(self) -> int:
        """The number of pages that are free, or cached and evictable, in the KV group that has the fewest."""
        most = self.pool.num_free + self.cache.num_evictable
        for window in self.windows:
            most = min(most, window.num_available)
        return most

    def available_pages(self) -> list[int]:
        """Return the number of pages that are free, or cached and evictable, by KV group."""
        first = self.pool.num_free + self.cache.num_evictable
        return [first, *(window.num_available for window in self.windows)]

    def missing_window_pages(self) -> list[int]:
        """Return how many pages running requests lack to a whole window, by KV group with a window."""
        return [
            sum(max(0, window.last_pages + 1 - len(request.pages[group])) for request in self.running)
            for group, window in enumerate(self.windows, 1)
        ]

    def start(self, request: Request, node: RadixNode, pages: list[int], held: Sequence[HeldWindow] = ()) -> SlotOpen:
        """Give a request a slot and the cached prefix that ends at `node`, which the caller has locked for it.

        `pages` are the resident pages of the prefix and `held` its last windows; pages for what is only in host memory
        are allocated here. In a model with states, tokens of the prefix may have to be computed again.
        """
        slot = self._free_slots.popleft()
        self.cache.count_use(node, request.priority)
        num_host_only = self.cache.num_host_only(node)
        cached = (len(pages) + num_host_only) * self.pool.page_size
        state = None
        if self.states is not None:
            state, cached = self.states.start(request, node, len(pages) + num_host_only)
        if num_host_only:
            loaded = self._allocate(num_host_only)
            self.cache.load(node, loaded)
            pages = pages + loaded
        request.rank = self.index
        request.slot = slot
        request.num_starts += 1
        request.phase = Phase.RUNNING
        request.node = node
        runs = self.cache.windows.load(held)
        request.pages = [pages, *(run.pages for run in runs)]
        request.passed = [0, *(run.first for run in runs)]
        request.num_shared_pages = len(pages)
        request.num_planned_tokens = request.num_computed_tokens = cached
        request.num_read_tokens = self._num_read_by_draft(pages)
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
            cached_pages=tuple(map(tuple, request.pages)),
            num_cached_tokens=cached,
            namespace=request.cache_salt,
            constrained=request.grammar is not None,
            state=state,
        )

    def extend(self, request: Request, num_tokens: int, *, drafts: bool = False) -> tuple[tuple[int, ...], ...]:
        """Allocate the pages that a request still needs for its first `num_tokens` tokens; return them by KV group.

        With `drafts`, they are for drafts that lengthen a chunk planned before, whose step still reads its windows.
        """
        pages = request.pages[0]
        count = self.pool.pages_for(num_tokens) - len(pages)
        if count <= 0:
            return self._no_pages
        new = self._allocate(count)
        pages.extend(new)
        if not self.windows:
            return (tuple(new),)
        # The step of this plan doesn't read the pages that are given up here, so that another request may write them.
        if not drafts:
            self.give_up_passed(request)
        added = [tuple(new)]
        for group in range(len(self.windows)):
            more = self.cache.windows.allocate(group, count)
            request.pages[group + 1] += more
            added.append(tuple(more))
        return tuple(added)

    def give_up_passed(self, request: Request) -> None:
        """Free the pages of windows that neither the next query of a request sees nor a later one."""
        for group, window in enumerate(self.windows, 1):
            first = window.first_seen(request.num_certain_tokens)
            if (count := first - request.passed[group]) > 0:
                pages = request.pages[group]
                window.release(pages[:count])
                del pages[:count]
                request.passed[group] = first

    def give_up_rejected(self, request: Request) -> None:
        """Free the pages that a request holds only for drafts that were rejected; no step in flight writes to them."""
        surplus = len(request.pages[0]) - self.pool.pages_for(request.num_planned_tokens)
        if surplus <= 0:
            return
        for group, pages in enumerate(request.pages):
            given = pages[-surplus:]
            del pages[-surplus:]
            if group:
                self.windows[group - 1].release(given)
            else:
                self.pool.release(given)

    def mark_read_by_draft(self, request: Request) -> None:
        """Mark the pages that a draft model has read, so that requests that find them in the cache know it."""
        read = max(0, request.num_read_tokens - request.num_unverified_tokens)
        for page in request.pages[0][: read // self.pool.page_size]:
            self.pool.read_by_draft[page] = 1

    def _num_read_by_draft(self, pages: Sequence[int]) -> int:
        """Return the number of tokens, from the first one on, that a draft model has read.

        A head reads the last token of a page together with the next one, which may have been another. That makes its
        drafts a little worse, but reading it again would do the same to other requests that have the page.
        """
        read = next((index for index, page in enumerate(pages) if not self.pool.read_by_draft[page]), len(pages))
        return read * self.pool.page_size

    def cache_prompt(self, request: Request) -> None:
        """Hand the whole pages of planned fill tokens to the cache; later steps may read them."""
        shared, size = request.num_shared_pages, self.pool.page_size
        whole = request.num_planned_tokens // size
        if whole <= shared:
            return
        assert request.node is not None
        request.node, taken = self.cache.extend(
            request.node,
            request.tokens(shared * size, whole * size),
            request.pages[0][shared:whole],
            shared,
            self._runs(request),
            request.priority,
        )
        request.num_shared_pages += taken
        if self.windows:
            self._filled.append(request)

    def advance(self, request: Request, *, last: bool) -> None:
        """Move a request to `decoding` when all its fill tokens are planned, or with `last` to `finishing`."""
        self.prefilling.pop(request.request_id, None) or self.decoding.pop(request.request_id)
        (self.finishing if last else self.decoding)[request.request_id] = request

    def stop(self, request: Request) -> None:
        """Remove a request and free its slot and pages; the cache takes over its whole pages."""
        self._free(request)
        for group in (self.prefilling, self.decoding, self.finishing):
            group.pop(request.request_id, None)

    def release_planned(self) -> None:
        """Free slots and pages that the steps planned before no longer need when the next one runs.

        These are the slots and pages of requests whose last token is planned, and the written pages of prompts that no
        later query sees.
        """
        if self.cache.states is not None:
            self.cache.states.start_plan()
        for request in self.finishing.values():
            self._free(request)
        for request in self._filled:
            if request.slot is not None:
                self.give_up_passed(request)
        self._filled.clear()

    def check(self) -> list[str]:
        """Return the inconsistencies found in slots, pages and cache, as sentences."""
        requests = [*self.running, *self.finishing.values()]
        problems = self._check_requests(requests)
        slots = Counter(self._free_slots)
        slots.update(request.slot for request in requests if request.slot is not None)
        problems += [
            f"slot {slot} is free or owned {slots[slot]} times" for slot in range(self.num_slots) if slots[slot] != 1
        ]
        own = (page for request in requests for page in request.pages[0][request.num_shared_pages :])
        groups = range(1, 1 + len(self.windows))
        used = [[page for request in requests if request.slot is not None for page in request.pages[group]]
                for group in groups]  # fmt: skip
        states = [request.state for request in requests if request.state is not None]
        problems += self.cache.check([request.node for request in requests if request.node is not None], used, states)
        return problems + self.pool.check([*own, *self.cache.pages()])

    def _check_requests(self, requests: list[Request]) -> list[str]:
        problems = []
        for request in requests:
            if request.phase is not Phase.RUNNING or request.rank != self.index:
                problems.append(
                    f"request {request.request_id} runs on this rank but is {request.phase} on rank {request.rank}"
                )
            if request.slot is None and (request.request_id not in self.finishing or request.pages[0] or request.node):
                problems.append(f"running request {request.request_id} has no slot")
            for passed, pages in zip(request.passed, request.pages) if request.slot is not None else ():
                planned = max(self.pool.pages_for(request.num_planned_tokens), request.num_shared_pages)
                if passed + len(pages) != planned:
                    problems.append(
                        f"request {request.request_id} has given up {passed} pages and holds {len(pages)} for "
                        f"{request.num_planned_tokens} tokens"
                    )
        return problems

    def _allocate(self, count: int) -> list[int]:
        """Allocate pages, evicting cached ones if needed; the caller makes sure that this many are available."""
        if count > self.pool.num_free:
            self.cache.evict(count - self.pool.num_free)
        return self.pool.allocate(count)

    def _free(self, request: Request) -> None:
        if request.slot is None:
            return
        self._free_slots.append(request.slot)
        request.slot = None
        self.mark_read_by_draft(request)
        pages, shared = request.pages[0], request.num_shared_pages
        # Planned tokens are written before any later step runs. To cache a page, its tokens must be known too.
        whole = max(min(request.num_certain_tokens, request.num_known_tokens) // self.pool.page_size, shared)
        self.pool.release(pages[whole:])
        tokens = request.tokens(0, whole * self.pool.page_size)
        runs = self._runs(request)
        self.cache.insert(request.namespace, tokens, pages[shared:whole], shared, runs, request.priority)
        if self.states is not None:
            self.states.stop(request, len(tokens))
        for window, run in zip(self.windows, runs):
            window.release(run.pages)
        assert request.node is not None
        self.cache.unlock(request.node)
        request.node = None
        request.num_shared_pages = 0
        request.pages = [[] for _ in self._no_pages]
        request.passed = [0] * len(request.pages)

    def _runs(self, request: Request) -> list[WindowRun]:
        """Return the pages of windows that a request has."""
        return [WindowRun(request.passed[group], request.pages[group]) for group in range(1, 1 + len(self.windows))]
