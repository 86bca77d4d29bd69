"""The order in which the prefix cache evicts, by policy: pages, their copies, pages of windows and states."""

from __future__ import annotations

import random

import pytest

from jaxserve.engine.kv_cache.eviction import EvictionHeap, EvictionPolicy
from jaxserve.engine.kv_cache.host_tier import HostTier
from jaxserve.engine.kv_cache.page_pool import PagePool
from jaxserve.engine.kv_cache.radix_cache import RadixCache
from jaxserve.engine.kv_cache.radix_node import RadixNode
from jaxserve.engine.kv_cache.state_pool import StatePool
from jaxserve.engine.kv_cache.window_pages import WindowPages, WindowRun

SIZE = 2
OLD, OFTEN, NEW = [1, 1], [2, 2], [3, 3]
KEPT = {"lru": [OFTEN, NEW], "lfu": [OLD, OFTEN], "priority": [OLD, NEW]}
"""Which two of the three prefixes are left, by policy."""
policies = pytest.mark.parametrize("policy", KEPT)


class Cache:
    """A cache with one page for each of a few prefixes, in all places that it can have."""

    def __init__(self, policy: EvictionPolicy, *, num_host_pages: int = 0, window: bool = False) -> None:
        self.pool = PagePool(8, SIZE)
        self.windows = [WindowPages(3, SIZE, 3, 0, policy)] if window else []
        self.tier = HostTier(num_host_pages, SIZE, "write_back", eviction=policy)
        self.tree = RadixCache(self.pool, self.tier, self.windows, policy=policy)

    def keep(self, tokens: list[int], priority: int = 0) -> None:
        count = len(tokens) // SIZE
        runs = [WindowRun(0, window.allocate(count)) for window in self.windows]
        self.tree.insert("", tokens, self.pool.allocate(count), 0, runs, priority)
        for window, run in zip(self.windows, runs):
            window.release(run.pages)

    def use(self, tokens: list[int], priority: int = 0) -> None:
        """Let a request begin with a prefix, and end."""
        node, _ = self.tree.match("", tokens, len(tokens))
        self.tree.lock(node)
        self.tree.count_use(node, priority)
        self.tree.unlock(node)

    def fill(self) -> Cache:
        """Keep three prefixes, each of which comes first by another policy."""
        self.keep(OLD, priority=3)
        self.use(OLD)
        self.keep(OFTEN)
        self.use(OFTEN, priority=1)
        self.use(OFTEN)
        self.keep(NEW, priority=2)
        return self

    def found(self) -> list[list[int]]:
        assert self.tree.check([]) == []
        return [tokens for tokens in (OLD, OFTEN, NEW) if self.tree.match_length("", tokens, SIZE)]


@policies
def test_pages_are_evicted_in_the_order_of_the_policy(policy: EvictionPolicy) -> None:
    cache = Cache(policy).fill()
    cache.tree.evict(1)
    assert cache.found() == KEPT[policy]


@policies
def test_copies_in_host_memory_are_evicted_in_the_order_of_the_policy(policy: EvictionPolicy) -> None:
    cache = Cache(policy, num_host_pages=3).fill()
    cache.tree.evict(3)
    assert len(cache.found()) == 3
    cache.keep([4, 4])
    cache.tree.evict(1)
    assert cache.found() == KEPT[policy]


@policies
def test_windows_are_evicted_in_the_order_of_the_policy(policy: EvictionPolicy) -> None:
    cache = Cache(policy, window=True).fill()
    cache.windows[0].make_room(1)
    assert cache.found() == KEPT[policy]


@policies
def test_states_are_evicted_in_the_order_of_the_policy(policy: EvictionPolicy) -> None:
    cache, states = Cache(policy).fill(), StatePool(3, policy=policy)
    nodes = [cache.tree.match("", tokens, SIZE)[0] for tokens in (OLD, OFTEN, NEW)]
    for node in nodes:
        row = states.take()
        assert row is not None
        states.give(node, row)
    states.take()
    left = [node for node in nodes if node.states[0] is not None]
    assert [node.tokens for node in left] == KEPT[policy]
    states.hold(left[0])
    assert states.take() is not None
    assert (left[1].states[0], states.take()) == (None, None)
    assert left[0].states[0] is not None


@pytest.mark.parametrize("policy", ["lfu", "priority"])
def test_of_equals_the_least_recently_used_is_evicted(policy: EvictionPolicy) -> None:
    cache = Cache(policy)
    for tokens in (OLD, OFTEN, NEW):
        cache.keep(tokens)
    cache.tree.match("", OLD, SIZE)  # a lookup alone, which may be repeated at each step, is no use
    cache.tree.evict(1)
    assert cache.found() == [OLD, NEW]


def test_a_prefix_has_the_highest_priority_of_the_requests_that_used_it() -> None:
    cache = Cache("priority")
    cache.keep(OLD)
    cache.use(OLD, priority=2)
    cache.use(OLD, priority=-5)
    cache.keep(NEW, priority=1)
    cache.tree.evict(1)
    assert cache.found() == [OLD]


def test_a_part_that_is_evicted_to_host_memory_keeps_its_uses() -> None:
    cache = Cache("lfu", num_host_pages=2)
    cache.keep([1, 1, 2, 2])
    cache.use([1, 1, 2, 2])
    cache.keep([3, 3])
    cache.tree.evict(2)  # the new one, and half of the other
    cache.keep([4, 4])
    cache.tree.evict(1)
    assert [cache.tree.match_length("", tokens, 4) for tokens in ([1, 1, 2, 2], [3, 3], [4, 4])] == [4, 0, 2]


def test_parts_of_a_node_that_is_split_keep_its_uses() -> None:
    cache = Cache("lfu")
    cache.keep([1, 1, 2, 2])
    cache.use([1, 1, 2, 2])
    cache.use([1, 1])
    cache.keep([3, 3, 3, 3])
    cache.use([3, 3, 3, 3])
    cache.tree.evict(2)
    assert cache.tree.match_length("", [1, 1, 2, 2], 4) == 2
    assert cache.tree.match_length("", [3, 3, 3, 3], 4) == 2, "of its end, as little as needed"


def test_what_follows_a_prefix_that_others_used_is_not_counted_as_used_by_them() -> None:
    cache = Cache("lfu")
    cache.keep(OFTEN)
    node, _ = cache.tree.match("", OFTEN, SIZE)
    cache.tree.lock(node)
    cache.tree.count_use(node, 0)
    node, _ = cache.tree.extend(node, [9, 9], cache.pool.allocate(1), 1)
    assert (node.tokens, node.num_uses) == ([9, 9], 1)
    node, _ = cache.tree.extend(node, [8, 8], cache.pool.allocate(1), 2)
    assert node.tokens == [9, 9, 8, 8], "a prompt in chunks is one node"
    cache.tree.unlock(node)


def test_the_heap_of_leaves_stays_bounded() -> None:
    cache = Cache("lru")
    for i in range(10_000):
        cache.keep([i % 5, 1])
    assert len(cache.tree._evictable) < 3000
    assert cache.tree.evict(99) == 5


def test_nodes_with_equal_keys_are_evicted_in_the_order_of_their_pushes() -> None:
    """So that a schedule depends on the requests alone, not on where Python keeps the nodes."""
    heap = EvictionHeap(lambda _: True)
    nodes = [RadixNode(None, [], [number]) for number in range(1500)]
    shuffled = random.Random(0).sample(nodes, len(nodes))
    for node in shuffled:  # past the size at which the heap is rebuilt
        heap.push(node)
    assert [heap.pop() for _ in nodes] == shuffled
