from __future__ import annotations

import pytest

from jaxserve.api_types import Usage
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.kv_cache.host_tier import HostTier, WritePolicy
from jaxserve.engine.kv_cache.page_pool import PagePool
from jaxserve.engine.kv_cache.radix_cache import RadixCache
from jaxserve.engine.kv_cache.radix_node import RadixNode
from tests.engine.conftest import make_capacity, make_request
from tests.engine.fake_executor import FakeExecutor, run_alone
from tests.engine.kv_cache.test_radix_cache import SIZE, _consistent, _keep
from tests.engine.scheduling.test_scheduler import make_scheduler

LONG = [1, 2, 3, 4, 5, 6]


def _tiered(num_pages: int, num_host_pages: int, policy: WritePolicy = "write_back") -> tuple[PagePool, RadixCache]:
    pool = PagePool(num_pages, SIZE)
    return pool, RadixCache(pool, HostTier(num_host_pages, SIZE, policy))


def _load(pool: PagePool, cache: RadixCache, tokens: list[int]) -> tuple[RadixNode, list[int]]:
    """Load a prefix as a starting request does; return its locked end and all its pages."""
    node, pages = cache.match("", tokens, len(tokens))
    cache.lock(node)
    host_only = cache.num_host_only(node)
    if host_only > pool.num_free:
        cache.evict(host_only - pool.num_free)
    loaded = pool.allocate(host_only)
    cache.load(node, loaded)
    return node, pages + loaded


def test_evicted_pages_are_found_again_and_loaded() -> None:
    pool, cache = _tiered(3, 8)
    pages = _keep(pool, cache, LONG)
    assert cache.evict(2) == 2
    saves, loads = cache.tier.take_copies()
    assert [page for _, page, _ in saves] == pages[1:]
    assert not loads
    assert cache.match_length("", LONG, 6) == 6
    node, resident = cache.match("", LONG, 6)
    assert (resident, cache.num_host_only(node)) == (pages[:1], 2)
    node, whole = _load(pool, cache, LONG)
    assert cache.tier.take_copies() == ([], [(0, slot, page) for (_, _, slot), page in zip(saves, whole[1:])])
    _consistent(pool, cache, [node], [])
    cache.unlock(node)
    assert cache.evict(3) == 3
    saves, _ = cache.tier.take_copies()
    assert [page for _, page, _ in saves] == pages[:1], "loaded pages keep their copies"
    assert cache.tier.num_used == 3
    _consistent(pool, cache, [], [])


def test_loading_does_not_evict_the_prefix_being_loaded() -> None:
    pool, cache = _tiered(3, 8)
    _keep(pool, cache, LONG)
    cache.evict(2)
    _keep(pool, cache, [7, 7, 8, 8])
    node, whole = _load(pool, cache, LONG)
    assert len(set(whole)) == 3
    assert cache.match("", [7, 7, 8, 8], 4)[1] == []
    assert cache.match_length("", [7, 7, 8, 8], 4) == 4
    cache.tier.take_copies()
    _consistent(pool, cache, [node], [])


def test_write_through_saves_in_the_plan_after_the_one_that_computes() -> None:
    pool, cache = _tiered(8, 8, "write_through")
    pages = _keep(pool, cache, LONG)
    assert cache.tier.take_copies() == ([], [])
    cache.tier.save_added()
    saves, _ = cache.tier.take_copies()
    assert [page for _, page, _ in saves] == pages
    cache.evict(3)
    assert cache.tier.take_copies() == ([], []), "the copies were made already"
    assert cache.match_length("", LONG, 6) == 6


def test_write_through_saves_grown_and_split_nodes() -> None:
    pool, cache = _tiered(8, 8, "write_through")
    node, _ = cache.match("", LONG, 0)
    cache.lock(node)
    pages = pool.allocate(3)
    node, _ = cache.extend(node, LONG[:2], pages[:1])
    cache.tier.save_added()
    node, _ = cache.extend(node, LONG[2:], pages[1:])
    upper, _ = cache.match("", [*LONG[:4], 9, 9], 6)
    assert upper is node.parent
    cache.tier.save_added()
    assert [page for _, page, _ in cache.tier.take_copies()[0]] == pages
    _consistent(pool, cache, [node], [])


def test_a_full_tier_evicts_the_least_recently_used_host_only_nodes() -> None:
    pool, cache = _tiered(8, 3)
    _keep(pool, cache, [1, 1, 2, 2])
    _keep(pool, cache, [5, 5])
    cache.evict(3)
    assert [cache.match_length("", tokens, 4) for tokens in ([1, 1, 2, 2], [5, 5])] == [4, 2]
    _keep(pool, cache, [6, 6, 7, 7])
    cache.evict(2)
    found = [cache.match_length("", tokens, 4) for tokens in ([1, 1, 2, 2], [5, 5], [6, 6, 7, 7])]
    assert found == [0, 2, 4]
    saves, _ = cache.tier.take_copies()
    assert len({slot for *_, slot in saves}) == len(saves) == 3, "an evicted slot is not written"
    _consistent(pool, cache, [], [])


def test_a_full_tier_keeps_the_beginning_of_a_sequence() -> None:
    pool, cache = _tiered(8, 2)
    _keep(pool, cache, LONG)
    cache.evict(3)
    assert cache.match_length("", LONG, 6) == 4
    assert pool.num_free == 8
    _consistent(pool, cache, [], [])


def test_the_end_of_a_sequence_is_evicted_for_its_beginning() -> None:
    pool, cache = _tiered(8, 2)
    _keep(pool, cache, LONG)
    cache.evict(2)
    assert cache.match_length("", LONG, 6) == 6
    cache.evict(1)
    assert cache.match_length("", LONG, 6) == 4
    _consistent(pool, cache, [], [])


def test_copies_of_resident_pages_are_not_evicted() -> None:
    pool, cache = _tiered(4, 2)
    _keep(pool, cache, LONG[:4])
    cache.evict(2)
    node, _ = _load(pool, cache, LONG[:4])
    cache.tier.take_copies()
    _keep(pool, cache, [7, 7])
    assert cache.evict(4) == 1
    assert cache.match_length("", [7, 7], 2) == 0
    _consistent(pool, cache, [node], [])


def test_recomputed_pages_make_host_only_nodes_resident() -> None:
    pool, cache = _tiered(8, 8)
    _keep(pool, cache, LONG)
    cache.evict(3)
    cache.tier.take_copies()
    again = _keep(pool, cache, [*LONG[:4], 9, 9])
    node, pages = cache.match("", [*LONG[:4], 9, 9], 6)
    assert (pages, cache.num_host_only(node)) == (again, 0)
    cache.evict(3)
    assert [page for _, page, _ in cache.tier.take_copies()[0]] == again[2:]
    assert cache.match_length("", LONG, 6) == 6
    _consistent(pool, cache, [], [])


def test_nodes_that_were_only_matched_can_be_evicted() -> None:
    pool, cache = _tiered(3, 8)
    _keep(pool, cache, LONG)
    cache.evict(2)
    for _ in range(2):
        cache.match("", LONG, 6)
    assert cache.evict(3) == 1
    _consistent(pool, cache, [], [])


def test_a_flush_empties_the_tier_too() -> None:
    pool, cache = _tiered(3, 8, "write_through")
    _keep(pool, cache, LONG)
    cache.tier.save_added()
    cache.evict(1)
    assert cache.tier.num_used == 3
    cache.flush()
    assert cache.tier.num_used == 0
    assert cache.tier.take_copies() == ([], []), "no saves are left after a flush"
    assert pool.num_free == 3


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_request_loads_evicted_pages_and_counts_them_as_cached(policy: WritePolicy) -> None:
    scheduler = make_scheduler(
        capacity=make_capacity(num_pages=8, page_size=4), num_host_pages=[16], host_write_policy=policy
    )
    first, other = make_request("first", 20, max_tokens=2), make_request("other", 24, max_tokens=2)
    again = make_request("again", [*first.prompt_ids, 1, 2], max_tokens=2)
    loop = EngineLoop(scheduler, FakeExecutor(scheduler._capacity))
    for request in (first, other, again):
        assert loop.add(request) is None
        events = []
        while loop.has_work:
            events += loop.step()
    assert [token for event in events for token in event.token_ids] == run_alone(again, 64).token_ids
    assert events[-1].usage == Usage(22, 2, cached_tokens=20)
    stats = scheduler.stats()
    assert (stats.cache_hit_tokens, stats.num_host_pages) == (20, 16)
    assert stats.host_load_pages >= 3
    assert stats.host_save_pages >= stats.num_host_pages_used >= 3
