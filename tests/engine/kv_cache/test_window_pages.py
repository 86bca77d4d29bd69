from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxserve.engine.kv_cache.cache_events import CacheEventRecorder
from jaxserve.engine.kv_cache.eviction import EvictionPolicy
from jaxserve.engine.kv_cache.host_tier import HostTier, WritePolicy
from jaxserve.engine.kv_cache.page_pool import PagePool
from jaxserve.engine.kv_cache.radix_cache import RadixCache
from jaxserve.engine.kv_cache.window_pages import WindowPages, WindowRun
from jaxserve.engine.scheduling.rank import Rank
from jaxserve.engine.scheduling.request import Request
from jaxserve.step_plan import WindowGroup
from tests.engine.conftest import make_capacity, make_request
from tests.selection import examples

SIZE = 2
WINDOW = 5
LAST = 2  # pages that hold the 4 tokens which a query sees before its own
LONG = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


def _cache(num_pages: int = 16, num_window_pages: int = 16) -> tuple[PagePool, RadixCache]:
    pool = PagePool(num_pages, SIZE)
    return pool, RadixCache(pool, None, [WindowPages(num_window_pages, SIZE, WINDOW, 0)])


def _keep(pool: PagePool, cache: RadixCache, tokens: list[int], first: int = 0) -> list[int]:
    """Insert a sequence that has given up its first pages of the window; return those that it had."""
    count = len(tokens) // SIZE
    cache.windows.groups[0].make_room(count - first)
    pages = cache.windows.groups[0].allocate(count - first)
    cache.insert("", tokens, pool.allocate(count), 0, [WindowRun(first, pages)])
    cache.windows.groups[0].release(pages)
    return pages


def _found(cache: RadixCache, tokens: list[int]) -> int:
    return cache.match_length("", tokens, len(tokens))


def test_a_prefix_is_found_as_far_as_the_last_window_is_there() -> None:
    pool, cache = _cache()
    _keep(pool, cache, LONG, first=3)
    assert _found(cache, LONG) == 12
    assert _found(cache, LONG[:10]) == 10, "pages 3 and 4 are the last window"
    assert _found(cache, LONG[:8]) == 0, "page 2 was given up"
    assert _found(cache, [*LONG[:10], 0, 0]) == 10
    node, pages = cache.match("", LONG, 12)
    [held] = cache.windows.hold(node)
    assert (held.first, held.num_resident, len(pages)) == (4, 2, 6)
    cache.windows.release([held])


def test_a_sequence_gives_the_tree_the_pages_that_it_lacks() -> None:
    pool, cache = _cache()
    _keep(pool, cache, LONG, first=4)
    assert _found(cache, LONG[:6]) == 0
    _keep(pool, cache, [*LONG[:6], 0, 0])
    assert _found(cache, LONG[:6]) == 6
    assert _found(cache, LONG) == 12
    _keep(pool, cache, LONG[:10])
    assert _found(cache, LONG[:8]) == 8
    assert cache.windows.groups[0].num_evictable == 7
    assert cache.check([], [()]) == []


def test_pages_that_only_shorter_prefixes_need_are_evicted_first() -> None:
    pool, cache = _cache(num_window_pages=6)
    _keep(pool, cache, LONG[:8])  # the older one
    _keep(pool, cache, [0, 0, 0, 0])
    assert cache.windows.groups[0].num_free == 0
    cache.windows.groups[0].make_room(2)
    assert [_found(cache, tokens) for tokens in (LONG[:8], LONG[:4], [0, 0, 0, 0])] == [8, 0, 4]
    cache.windows.groups[0].make_room(3)
    assert [_found(cache, tokens) for tokens in (LONG[:8], [0, 0, 0, 0])] == [0, 4], "then the least recently used"


def test_pages_that_a_request_uses_are_not_evicted() -> None:
    pool, cache = _cache(num_window_pages=6)
    _keep(pool, cache, LONG)
    node, _ = cache.match("", LONG, 12)
    cache.lock(node)
    held = cache.windows.hold(node)
    window = cache.windows.groups[0]
    assert (window.num_evictable, window.num_available) == (6 - LAST, 6 - LAST)
    window.make_room(6 - LAST)
    assert _found(cache, LONG) == 12
    cache.windows.release(held)
    window.make_room(6)
    assert _found(cache, LONG) == 0
    cache.unlock(node)


def test_evicting_whole_sequences_frees_their_windows() -> None:
    pool, cache = _cache(num_pages=6)
    _keep(pool, cache, LONG)
    cache.evict(2)
    assert cache.windows.groups[0].num_available == 16
    assert cache.windows.groups[0].num_free == 16 - 4
    cache.flush()
    assert (pool.num_free, cache.windows.groups[0].num_free) == (6, 16)


class WindowMachine(RuleBasedStateMachine):
    """Runs sequences on a rank with two KV groups, in any order, against a model of what each page holds.

    Each whole page holds the tokens of its sequence up to its end, as they were last written or loaded.
    """

    num_host_pages: tuple[int, ...] = (0, 0)
    policy: WritePolicy = "write_through"
    eviction: EvictionPolicy = "lru"

    def __init__(self) -> None:
        super().__init__()
        capacity = make_capacity(num_pages=12, page_size=SIZE, num_slots=4, window_groups=(WindowGroup(9, WINDOW),))
        pool, windows = PagePool(12, SIZE), [WindowPages(9, SIZE, WINDOW, 0, self.eviction)]
        num_slots, num_copies = self.num_host_pages
        copies = [WindowPages(num_copies, SIZE, WINDOW, 1, self.eviction)] if num_slots else []
        recorder = CacheEventRecorder(SIZE)
        tier = HostTier(num_slots, SIZE, self.policy, copies, recorder, eviction=self.eviction)
        self.rank = Rank(0, capacity, RadixCache(pool, tier, windows, policy=self.eviction), pool)
        self.held: dict[tuple[int, int], tuple[int, ...]] = {}
        self.host: dict[tuple[int, int], tuple[int, ...]] = {}
        self.running: list[Request] = []
        self.num_started = 0

    @precondition(lambda self: self.rank.num_free_slots)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def start(self, tokens: list[int]) -> None:
        """Plan a step that computes a whole prompt."""
        self._begin_plan()
        cache, rank = self.rank.cache, self.rank
        found = cache.match_length(("", False), tokens, len(tokens) - 1)
        node, pages = cache.match(("", False), tokens, len(tokens) - 1)
        host_only = cache.num_host_only(node)
        assert found == SIZE * (len(pages) + host_only)
        cache.lock(node)
        held = cache.windows.hold(node)
        new = -(-len(tokens) // SIZE) - len(pages) - host_only
        loaded = sum(len(part.slots) for part in held[0].parts)
        available = rank.available_pages()
        if new + host_only > available[0] or new + loaded > available[1]:
            cache.windows.release(held)
            cache.unlock(node)
            self._end_plan()
            return
        self.num_started += 1
        source = make_request(f"r{self.num_started}", tokens)
        priority = self.num_started % 3
        request = Request(
            source, sampling=source.sampling, arrival=0, arrived_at=0.0, max_new_tokens=99, priority=priority
        )
        self.running.append(request)
        rank.start(request, node, pages, held)
        self._plan(request, len(tokens))
        rank.cache_prompt(request)
        rank.advance(request, last=False)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def decode(self, data: st.DataObject, tokens: list[int]) -> None:
        """Plan a step for each token that follows."""
        request = data.draw(st.sampled_from(self.running))
        for token in tokens:
            self._begin_plan()
            if not self.rank.num_available_pages:
                self._end_plan()
                return
            request.output_ids.append(token)
            self._plan(request, request.num_planned_tokens + 1)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.rank.stop(request)

    @rule()
    def flush(self) -> None:
        self.rank.cache.flush()
        assert self.rank.cache.tier.num_used == 0

    @invariant()
    def every_page_is_counted_and_holds_what_it_should(self) -> None:
        assert self.rank.check() == []
        for request in self.running:
            for group, (passed, pages) in enumerate(zip(request.passed, request.pages)):
                for column, page in enumerate(pages, passed):
                    end = (column + 1) * SIZE
                    if end <= request.num_planned_tokens:
                        assert self.held[group, page] == tuple(request.tokens(0, end))
            for window, passed in zip(self.rank.windows, request.passed[1:]):
                assert passed <= window.first_seen(request.num_planned_tokens)

    def _begin_plan(self) -> None:
        self.rank.release_planned()
        self.rank.cache.tier.save_added()

    def _plan(self, request: Request, num_tokens: int) -> None:
        start = request.num_planned_tokens
        self.rank.extend(request, num_tokens)
        request.num_planned_tokens = num_tokens
        self._end_plan()
        for group, (passed, pages) in enumerate(zip(request.passed, request.pages)):
            for column in range(start // SIZE, num_tokens // SIZE):
                self.held[group, pages[column - passed]] = tuple(request.tokens(0, (column + 1) * SIZE))

    def _end_plan(self) -> None:
        saves, loads = self.rank.cache.tier.take_copies()
        for group, page, slot in saves:
            self.host[group, slot] = self.held[group, page]
        for group, slot, page in loads:
            self.held[group, page] = self.host[group, slot]


class WindowWriteThroughMachine(WindowMachine):
    num_host_pages = (20, 12)
    eviction = "priority"


class WindowWriteBackMachine(WindowMachine):
    num_host_pages = (30, 9)
    policy = "write_back"
    eviction = "lfu"


class TinyWindowTierMachine(WindowMachine):
    num_host_pages = (5, 2)
    policy = "write_back"


TestWindows = WindowMachine.TestCase
TestWindowsWriteThrough = WindowWriteThroughMachine.TestCase
TestWindowsWriteBack = WindowWriteBackMachine.TestCase
TestTinyWindowTier = TinyWindowTierMachine.TestCase
for case in (TestWindows, TestWindowsWriteThrough, TestWindowsWriteBack, TestTinyWindowTier):
    case.settings = settings(max_examples=examples(100), stateful_step_count=30, derandomize=True)
