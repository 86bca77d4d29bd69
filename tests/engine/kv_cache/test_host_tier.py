from __future__ import annotations

import pytest

from jaxserve.api_types import Usage
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.kv_cache.host_tier import HostTier, WritePolicy
from jaxserve.engine.kv_cache.page_pool import PagePool
from jaxserve.engine.kv_cache.radix_cache import RadixCache
from jaxserve.engine.kv_cache.radix_node import Node
from tests.engine.conftest import make_capacity, make_request
from tests.engine.fake_executor import FakeExecutor, run_alone
from tests.engine.kv_cache.test_radix_cache import SIZE, _consistent, _keep
from tests.engine.scheduling.test_scheduler import make_scheduler

LONG = [1, 2, 3, 4, 5, 6]


def _tiered(num_pages: int, num_host_pages: int, policy: WritePolicy = "write_back") -> tuple[PagePool, RadixCache]:
    pool = PagePool(num_pages, SIZE)
    return pool, RadixCache(pool, HostTier(num_host_pages, SIZE, policy))


def _load(pool: PagePool, cache: RadixCache, tokens: list[int]) -> tuple[Node, list[int]]:
    """Do as a request does that starts; returns the locked end and all of its pages."""
    node, pages = cache.match("", tokens, len(tokens))
    cache.lock(node)
    absent = cache.num_absent(node)
    if absent > pool.num_free:
        cache.evict(absent - pool.num_free)
    loaded = pool.allocate(absent)
    cache.load(node, loaded)
    return node, pages + loaded


def test_what_is_evicted_is_found_again_and_loaded() -> None:
    pool, cache = _tiered(3, 8)
    pages = _keep(pool, cache, LONG)
    assert cache.evict(2) == 2
    saves, loads = cache.tier.take_copies()
    assert [page for page, _ in saves] == pages[1:]
    assert not loads
    assert cache.match_length("", LONG, 6) == 6
    node, resident = cache.match("", LONG, 6)
    assert (resident, cache.num_absent(node)) == (pages[:1], 2)
    node, whole = _load(pool, cache, LONG)
    assert cache.tier.take_copies() == ([], [(slot, page) for (_, slot), page in zip(saves, whole[1:])])
    _consistent(pool, cache, [node], [])
    cache.unlock(node)
    assert cache.evict(3) == 3
    saves, _ = cache.tier.take_copies()
    assert [page for page, _ in saves] == pages[:1], "what was loaded has its copy still"
    assert cache.tier.num_used == 3
    _consistent(pool, cache, [], [])


def test_what_is_loaded_is_locked_first_so_that_room_is_made_elsewhere() -> None:
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


def test_write_through_saves_with_the_plan_after_the_one_that_computes() -> None:
    pool, cache = _tiered(8, 8, "write_through")
    pages = _keep(pool, cache, LONG)
    assert cache.tier.take_copies() == ([], [])
    cache.tier.save_entered()
    saves, _ = cache.tier.take_copies()
    assert [page for page, _ in saves] == pages
    cache.evict(3)
    assert cache.tier.take_copies() == ([], []), "the copies are there"
    assert cache.match_length("", LONG, 6) == 6


def test_write_through_follows_a_run_that_grows_and_one_that_is_split() -> None:
    pool, cache = _tiered(8, 8, "write_through")
    node, _ = cache.match("", LONG, 0)
    cache.lock(node)
    pages = pool.allocate(3)
    node, _ = cache.extend(node, LONG[:2], pages[:1])
    cache.tier.save_entered()
    node, _ = cache.extend(node, LONG[2:], pages[1:])
    upper, _ = cache.match("", [*LONG[:4], 9, 9], 6)
    assert upper is node.parent
    cache.tier.save_entered()
    assert [page for page, _ in cache.tier.take_copies()[0]] == pages
    _consistent(pool, cache, [node], [])


def test_a_full_tier_gives_up_what_only_it_has_the_least_recently_used_first() -> None:
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
    assert len({slot for _, slot in saves}) == len(saves) == 3, "a slot that was given up is not written for nothing"
    _consistent(pool, cache, [], [])


def test_without_room_the_beginning_is_kept_and_what_follows_is_forgotten() -> None:
    pool, cache = _tiered(8, 2)
    _keep(pool, cache, LONG)
    cache.evict(3)
    assert cache.match_length("", LONG, 6) == 4
    assert pool.num_free == 8
    _consistent(pool, cache, [], [])


def test_the_end_of_a_sequence_makes_room_for_its_beginning() -> None:
    pool, cache = _tiered(8, 2)
    _keep(pool, cache, LONG)
    cache.evict(2)
    assert cache.match_length("", LONG, 6) == 6
    cache.evict(1)
    assert cache.match_length("", LONG, 6) == 4
    _consistent(pool, cache, [], [])


def test_what_is_used_on_the_device_makes_no_room_in_the_tier() -> None:
    pool, cache = _tiered(4, 2)
    _keep(pool, cache, LONG[:4])
    cache.evict(2)
    node, _ = _load(pool, cache, LONG[:4])
    cache.tier.take_copies()
    _keep(pool, cache, [7, 7])
    assert cache.evict(4) == 1
    assert cache.match_length("", [7, 7], 2) == 0
    _consistent(pool, cache, [node], [])


def test_pages_computed_again_take_the_place_of_what_only_the_host_had() -> None:
    pool, cache = _tiered(8, 8)
    _keep(pool, cache, LONG)
    cache.evict(3)
    cache.tier.take_copies()
    again = _keep(pool, cache, [*LONG[:4], 9, 9])
    node, pages = cache.match("", [*LONG[:4], 9, 9], 6)
    assert (pages, cache.num_absent(node)) == (again, 0)
    cache.evict(3)
    assert [page for page, _ in cache.tier.take_copies()[0]] == again[2:]
    assert cache.match_length("", LONG, 6) == 6
    _consistent(pool, cache, [], [])


def test_what_was_only_looked_at_can_be_evicted_still() -> None:
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
    cache.tier.save_entered()
    cache.evict(1)
    assert cache.tier.num_used == 3
    cache.flush()
    assert cache.tier.num_used == 0
    assert cache.tier.take_copies() == ([], []), "nobody would read them"
    assert pool.num_free == 3


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_request_loads_what_was_evicted_and_says_so(policy: WritePolicy) -> None:
    scheduler = make_scheduler(
        capacity=make_capacity(num_pages=8, page_size=4), num_host_pages=16, host_write_policy=policy
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
