from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxserve.engine.kv_cache.cache_events import CacheEventRecorder
from jaxserve.engine.kv_cache.eviction import EvictionPolicy
from jaxserve.engine.kv_cache.host_tier import HostTier, WritePolicy
from jaxserve.engine.kv_cache.page_pool import PagePool
from jaxserve.engine.kv_cache.radix_cache import RadixCache
from jaxserve.engine.kv_cache.radix_node import RadixNode, descendants
from tests.selection import examples

SIZE = 2


def _cache(num_pages: int = 16, tier: HostTier | None = None) -> tuple[PagePool, RadixCache]:
    pool = PagePool(num_pages, SIZE)
    return pool, RadixCache(pool, tier)


def _keep(pool: PagePool, cache: RadixCache, tokens: list[int], namespace: str = "") -> list[int]:
    pages = pool.allocate(len(tokens) // SIZE)
    cache.insert(namespace, tokens, pages, 0)
    return pages


def _consistent(pool: PagePool, cache: RadixCache, ends: list[RadixNode], own: list[int]) -> None:
    assert cache.check(ends) == []
    assert pool.check([*own, *cache.pages()]) == []


def test_a_match_ends_at_a_whole_page_and_at_the_limit() -> None:
    pool, cache = _cache()
    pages = _keep(pool, cache, [1, 2, 3, 4, 5, 6])
    assert cache.match("", [1, 2, 3, 4, 5, 6, 7], 7)[1] == pages
    assert cache.match("", [1, 2, 3, 4, 5, 6], 5)[1] == pages[:2]
    assert cache.match("", [1, 2, 3, 9, 5, 6], 6)[1] == pages[:1]
    assert cache.match("", [9, 2, 3, 4], 4)[1] == []
    assert cache.match("other", [1, 2, 3, 4], 4)[1] == []
    assert cache.match_length("", [1, 2, 3, 4, 9], 5) == 4
    _consistent(pool, cache, [], [])


def test_a_match_ends_where_tokens_differ() -> None:
    pool, cache = _cache()
    pages = _keep(pool, cache, [1, 1, 2, 2])
    _keep(pool, cache, [1, 1, 2, 2, 3, 3])
    assert cache.match("", [1, 1, 3, 3], 4)[1] == pages[:1]
    assert cache.match("", [1, 1, 3, 3], 4)[1] == pages[:1]


def test_cached_pages_are_not_kept_twice() -> None:
    pool, cache = _cache(8)
    pages = _keep(pool, cache, [1, 2, 3, 4])
    _keep(pool, cache, [1, 2, 3, 4, 5, 6])
    assert pool.num_free == 8 - 3
    assert cache.match("", [1, 2, 3, 4, 5, 6, 0], 7)[1][:2] == pages


def test_the_end_of_the_least_recently_used_leaf_is_evicted_first() -> None:
    pool, cache = _cache()
    _keep(pool, cache, [1, 2, 3, 4, 5, 6])
    _keep(pool, cache, [1, 2, 9, 9])
    _keep(pool, cache, [7, 7])
    cache.match("", [1, 2, 3, 4, 5, 6], 6)
    assert cache.evict(2) == 2
    assert [cache.match_length("", tokens, 9) for tokens in ([1, 2, 9, 9], [7, 7])] == [2, 0]
    assert cache.evict(1) == 1
    assert cache.match_length("", [1, 2, 3, 4, 5, 6], 9) == 4
    assert cache.evict(99) == 2
    assert pool.num_free == 16
    assert cache.num_evictable == 0


def test_locked_nodes_and_their_ancestors_are_not_evicted() -> None:
    pool, cache = _cache(3)
    _keep(pool, cache, [1, 2, 3, 4, 5, 6])
    node, pages = cache.match("", [1, 2, 3, 4], 4)
    cache.lock(node)
    assert cache.num_evictable == 1
    assert cache.evict(3) == 1
    assert cache.match("", [1, 2, 3, 4, 5, 6], 6)[1] == pages
    _consistent(pool, cache, [node], [])
    cache.unlock(node)
    assert cache.evict(3) == 2


def test_a_chunked_prompt_is_one_node() -> None:
    pool, cache = _cache()
    node, _ = cache.match("", [1, 2, 3, 4], 3)
    cache.lock(node)
    pages = pool.allocate(2)
    node, taken = cache.extend(node, [1, 2], pages[:1])
    assert taken == 1
    again, taken = cache.extend(node, [3, 4], pages[1:])
    assert (again, taken) == (node, 1)
    assert node.pages == pages
    _consistent(pool, cache, [node], [])


def test_two_requests_that_compute_the_same_keep_their_own_pages() -> None:
    pool, cache = _cache()
    root, _ = cache.match("", [1, 2], 1)
    cache.lock(root)
    cache.lock(root)
    first, second = pool.allocate(1), pool.allocate(1)
    node, _ = cache.extend(root, [1, 2], first)
    assert cache.extend(root, [1, 2], second) == (root, 0)
    cache.insert("", [1, 2], second, 0)
    cache.unlock(root)
    assert pool.num_free == 15
    _consistent(pool, cache, [node], [])


def test_a_flush_frees_locked_pages_when_they_are_unlocked() -> None:
    pool, cache = _cache(4)
    _keep(pool, cache, [1, 2, 3, 4])
    _keep(pool, cache, [5, 6])
    node, pages = cache.match("", [1, 2, 3, 4], 4)
    cache.lock(node)
    assert cache.flush() == 1
    assert cache.match_length("", [1, 2, 3, 4], 4) == 0
    _keep(pool, cache, [1, 2])
    _consistent(pool, cache, [node], [])
    own = pool.allocate(1)
    assert cache.extend(node, [5, 6], own) == (node, 0), "a detached node is not extended"
    cache.insert("", [1, 2, 3, 4, 5, 6], own, 2)
    cache.unlock(node)
    assert pool.num_free == 3
    _consistent(pool, cache, [], [])
    assert pages


def test_a_disabled_cache_keeps_nothing() -> None:
    pool = PagePool(4, SIZE)
    cache = RadixCache(pool, disabled=True)
    _keep(pool, cache, [1, 2, 3, 4])
    assert pool.num_free == 4
    node, pages = cache.match("", [1, 2, 3, 4], 4)
    cache.lock(node)
    own = pool.allocate(1)
    assert (cache.extend(node, [1, 2], own), pages) == ((node, 0), [])


class CacheMachine(RuleBasedStateMachine):
    """Runs sequences that start and end in any order against a model: dictionaries from pages and host slots to
    their tokens.

    Each page holds the tokens that were last written to it or loaded into it, as the cache reports.
    """

    num_host_pages = 0
    policy: WritePolicy = "write_through"
    eviction: EvictionPolicy = "lru"

    def __init__(self) -> None:
        super().__init__()
        recorder = CacheEventRecorder(SIZE)  # `RadixCache.check` compares what it has recorded with the tree
        tier = HostTier(self.num_host_pages, SIZE, self.policy, (), recorder, eviction=self.eviction)
        self.pool = PagePool(12, SIZE)
        self.cache = RadixCache(self.pool, tier, policy=self.eviction)
        self.held: dict[int, tuple[int, ...]] = {}
        self.host: dict[int, tuple[int, ...]] = {}
        self.running: list[tuple[list[int], RadixNode, int, list[int]]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), priority=st.integers(0, 2))
    def start(self, tokens: list[int], priority: int) -> None:
        """Make one plan: first save evicted pages, then load, then write."""
        self.cache.tier.save_added()
        found = self.cache.match_length("", tokens, len(tokens) - 1)
        node, pages = self.cache.match("", tokens, len(tokens) - 1)
        host_only = self.cache.num_host_only(node)
        assert found == SIZE * (len(pages) + host_only)
        self.cache.lock(node)
        needed = -(-len(tokens) // SIZE) - len(pages)
        if needed > self.pool.num_free + self.cache.num_evictable:
            self.cache.unlock(node)
            return
        if needed > self.pool.num_free:
            short = needed - self.pool.num_free
            assert self.cache.evict(short) == short
        own = self.pool.allocate(needed)
        self.cache.count_use(node, priority)
        self.cache.load(node, own[:host_only])
        pages, own = pages + own[:host_only], own[host_only:]
        self._run_copies()
        for i, page in enumerate(pages):
            assert self.held[page] == tuple(tokens[: (i + 1) * SIZE])
        for i, page in enumerate(own, len(pages)):
            self.held[page] = tuple(tokens[: (i + 1) * SIZE])
        shared, whole = len(pages), len(tokens) // SIZE
        added = tokens[shared * SIZE : whole * SIZE]
        node, taken = self.cache.extend(node, added, own[: whole - shared], priority=priority)
        self.running.append((tokens, node, shared + taken, own[taken:]))

    def _run_copies(self) -> None:
        saves, loads = self.cache.tier.take_copies()
        for _, page, slot in saves:
            self.host[slot] = self.held[page]
        for _, slot, page in loads:
            self.held[page] = self.host[slot]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        tokens, node, shared, own = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        whole = max(len(tokens) // SIZE, shared)
        self.pool.release(own[whole - shared :])
        self.cache.insert("", tokens[: whole * SIZE], own[: whole - shared], shared)
        self.cache.unlock(node)

    @rule(count=st.integers(1, 12))
    def evict(self, count: int) -> None:
        """The order of the policy holds although nodes are split, grow, and are used while they wait in the heap."""
        if (first := self.cache._evictable.pop()) is not None:
            self.cache._evictable.push(first)
            assert self._key(first) == min(map(self._key, filter(_can_be_evicted, descendants(self.cache._root("")))))
        expected = min(count, self.cache.num_evictable)
        assert self.cache.evict(count) == expected

    def _key(self, node: RadixNode) -> tuple[int, int]:
        return {"lru": 0, "lfu": node.num_uses, "priority": node.priority}[self.eviction], node.last_used

    @rule()
    def flush(self) -> None:
        before = self.pool.num_free
        assert self.cache.flush() == self.pool.num_free - before
        assert self.cache.tier.num_used == 0

    @invariant()
    def every_page_is_counted_once(self) -> None:
        own = [page for *_, pages in self.running for page in pages]
        _consistent(self.pool, self.cache, [node for _, node, _, _ in self.running if not node.detached], own)


def _can_be_evicted(node: RadixNode) -> bool:
    return bool(node.pages) and not node.locks and not any(child.pages for child in node.children.values())


class WriteThroughMachine(CacheMachine):
    num_host_pages = 9
    eviction = "lfu"


class WriteBackMachine(CacheMachine):
    num_host_pages = 30
    policy = "write_back"
    eviction = "priority"


class TinyTierMachine(CacheMachine):
    num_host_pages = 2
    policy = "write_back"


TestCache = CacheMachine.TestCase
TestWriteThrough = WriteThroughMachine.TestCase
TestWriteBack = WriteBackMachine.TestCase
TestTinyTier = TinyTierMachine.TestCase
for case in (TestCache, TestWriteThrough, TestWriteBack, TestTinyTier):
    case.settings = settings(max_examples=examples(100), stateful_step_count=30, derandomize=True)
