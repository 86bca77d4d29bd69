from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from jaxserve.engine.kv_cache.cache_events import (
    CacheCleared,
    CacheEvent,
    CacheEventRecorder,
    PagesRemoved,
    PagesStored,
)
from jaxserve.engine.kv_cache.host_tier import HostTier, WritePolicy
from jaxserve.engine.kv_cache.page_pool import PagePool
from jaxserve.engine.kv_cache.radix_cache import RadixCache
from jaxserve.engine.kv_cache.radix_node import RadixNode
from jaxserve.engine.kv_cache.state_pool import StatePool
from jaxserve.engine.process.cache_publisher import EventBatch
from tests.engine.cache_subscriber import CacheSubscriber
from tests.engine.kv_cache.test_radix_cache import SIZE, _keep

LONG = [1, 2, 3, 4, 5, 6, 7, 8]
FIXTURE = Path(__file__).parents[2] / "fixtures" / "vllm_kv_events.msgpack"


def _cache(num_host_pages: int = 0, policy: WritePolicy = "write_back") -> tuple[PagePool, RadixCache]:
    pool = PagePool(16, SIZE)
    return pool, RadixCache(pool, HostTier(num_host_pages, SIZE, policy, (), CacheEventRecorder(SIZE)))


def _taken(cache: RadixCache) -> list[CacheEvent]:
    assert cache.tier.recorder is not None
    assert cache.check([]) == []
    return cache.tier.recorder.take()


def _stored(
    hashes: list[int], parent: int | None, tokens: list[int], medium: str = "GPU", salt: str = ""
) -> PagesStored:
    keys: list[tuple[str, ...] | None] | None = [(salt,), *[None] * (len(hashes) - 1)] if salt else None
    return PagesStored(hashes, parent, tokens, SIZE, None, medium, None, keys, 0, "full_attention")


# The hashes of the pages 10 20, 30 40, 50 60 and 70 80, as SGLang's router computes them, but without a sign: vLLM's.
TENS = [10, 20, 30, 40, 50, 60, 70, 80]
SGLANG_HASHES = [978178666101069530, 17551435517498269834, 10413051267863533678, 835415944263129316]


def test_hashes_are_those_of_sglang_and_each_event_names_the_page_before() -> None:
    pool, cache = _cache()
    _keep(pool, cache, TENS[:4])
    _keep(pool, cache, TENS)
    assert _taken(cache) == [
        _stored(SGLANG_HASHES[:2], None, TENS[:4]),
        _stored(SGLANG_HASHES[2:], SGLANG_HASHES[1], TENS[4:]),
    ]


def test_a_salt_changes_all_hashes_and_is_named_at_the_first_page() -> None:
    pool, cache = _cache()
    _keep(pool, cache, TENS, namespace="tenant")
    [event] = _taken(cache)
    assert isinstance(event, PagesStored)
    assert not set(event.block_hashes) & set(SGLANG_HASHES)
    assert event == _stored(event.block_hashes, None, TENS, salt="tenant")


def test_a_prompt_in_chunks_is_one_chain() -> None:
    pool, cache = _cache()
    node, _ = cache.match("", TENS, 0)
    cache.lock(node)
    for start in range(0, len(TENS), 4):
        node, _ = cache.extend(node, TENS[start : start + 4], pool.allocate(2))
    cache.unlock(node)
    assert [event.block_hashes for event in _taken(cache) if isinstance(event, PagesStored)] == [
        SGLANG_HASHES[:2],
        SGLANG_HASHES[2:],
    ]


def test_evicted_pages_are_removed_the_last_first() -> None:
    pool, cache = _cache()
    _keep(pool, cache, TENS)
    _taken(cache)
    cache.evict(3)
    assert _taken(cache) == [PagesRemoved(SGLANG_HASHES[:0:-1], "GPU", 0)]


def test_a_page_with_a_copy_is_in_both_media_and_loses_them_one_by_one() -> None:
    pool, cache = _cache(4, "write_through")
    _keep(pool, cache, TENS)
    cache.tier.save_added()
    assert _taken(cache) == [_stored(SGLANG_HASHES, None, TENS), _stored(SGLANG_HASHES, None, TENS, "CPU")]
    cache.evict(4)
    assert _taken(cache) == [PagesRemoved(SGLANG_HASHES[::-1], "GPU", 0)]
    node, _ = cache.match("", TENS, 4)
    cache.lock(node)
    cache.load(node, pool.allocate(2))
    assert cache.tier.recorder is not None
    assert cache.tier.recorder.take() == [_stored(SGLANG_HASHES[:2], None, TENS[:4])]
    cache.unlock(node)
    cache.tier.take_copies()
    _keep(pool, cache, [9, 9])
    cache.tier.save_added()
    _, removed, saved = _taken(cache)
    assert removed == PagesRemoved([SGLANG_HASHES[3]], "CPU", 0)
    assert isinstance(saved, PagesStored)
    assert saved.medium == "CPU"


def test_a_subscriber_knows_what_can_be_found_after_splits_loads_and_flushes() -> None:
    pool, cache = _cache(3)
    subscriber = CacheSubscriber()
    _keep(pool, cache, LONG)
    _keep(pool, cache, [*LONG[:4], 9, 9])
    cache.evict(4)
    _keep(pool, cache, [*LONG[:6], 0, 0])
    cache.match("", LONG, 2)
    subscriber.receive(_taken(cache))
    assert cache.tier.recorder is not None
    assert subscriber.hashes == cache.tier.recorder.hashes()
    assert all(subscriber.hashes.values())
    cache.flush()
    _keep(pool, cache, LONG)
    events = _taken(cache)
    assert isinstance(events[0], CacheCleared)
    subscriber.receive(events)
    assert [len(hashes) for hashes in subscriber.hashes.values()] == [4, 0]


def test_the_beginning_of_a_prefix_is_loaded_first() -> None:
    pool, cache = _cache(4)
    subscriber = CacheSubscriber()
    _keep(pool, cache, LONG)
    cache.evict(4)
    cache.match("", LONG, 4)
    node, _ = cache.match("", LONG, 8)
    subscriber.receive(_taken(cache))
    cache.lock(node)
    cache.load(node, pool.allocate(4))
    assert cache.tier.recorder is not None
    loaded = cache.tier.recorder.take()
    assert len(loaded) == 2
    subscriber.receive(loaded)
    assert [len(hashes) for hashes in subscriber.hashes.values()] == [4, 4]


def test_pages_that_a_flush_has_detached_are_not_removed_again() -> None:
    pool, cache = _cache()
    _keep(pool, cache, TENS)
    node, _ = cache.match("", TENS, 4)
    cache.lock(node)
    cache.flush()
    assert _taken(cache)[-1] == CacheCleared()
    assert cache.extend(node, [1, 1], pool.allocate(1)) == (node, 0)
    cache.unlock(node)
    assert _taken(cache) == []


def test_in_a_model_with_states_pages_are_told_of_up_to_the_last_state() -> None:
    pool, recorder = PagePool(16, SIZE), CacheEventRecorder(SIZE, needs_states=True)
    states = StatePool(2, count=recorder.count_state)
    cache = RadixCache(pool, HostTier(16, SIZE, "write_back", (), recorder, 2), states=states)
    assert cache.states is not None
    subscriber = CacheSubscriber()

    def found() -> list[int]:
        """Return how many pages subscribers find on the device and in host memory."""
        subscriber.receive(_taken(cache))
        assert subscriber.hashes == recorder.hashes()
        return [len(hashes) for hashes in subscriber.hashes.values()]

    def snapshot(count: int) -> RadixNode:
        node, row = cache.end_of("", TENS[:count]), states.take()
        assert node is not None
        assert row is not None
        cache.states.take_over(node, row)
        return node

    _keep(pool, cache, TENS)
    assert found() == [0, 0]
    middle = snapshot(4)
    assert found() == [2, 0]
    assert subscriber.hashes["GPU"] == set(SGLANG_HASHES[:2])
    end = snapshot(8)
    assert found() == [4, 0]
    states.drop(middle)
    assert found() == [4, 0], "the state at the end needs all pages"
    cache.evict(4)
    assert found() == [0, 4]
    cache.tier.drop_state(end)
    assert found() == [0, 0]


@pytest.mark.parametrize("lost", ["page", "slot", "hash", "copied hash"])
def test_the_check_finds_what_the_events_lack_and_what_they_have_too_much(lost: str) -> None:
    pool, cache = _cache(8, "write_through")
    _keep(pool, cache, TENS)
    cache.tier.save_added()
    recorder = cache.tier.recorder
    assert recorder is not None
    told = recorder._pages if lost in ("page", "hash") else recorder._slots
    if "hash" in lost:
        told[3] = told[2]
    else:
        told.pop(3)
    [problem] = cache.check([])
    expected = {
        "page": "of the 4 pages on the device, the events lack 1; and they have 0 others",
        "slot": "in host memory",
    }
    assert expected.get(lost, "a cached run of 4 pages has other hashes") in problem


def test_events_have_the_bytes_of_vllm() -> None:
    """The fixture was encoded by the structs of vLLM 0.32's `distributed/kv_events.py`."""
    raw = FIXTURE.read_bytes()
    batch = msgspec.msgpack.decode(raw, type=EventBatch)
    assert [type(event) for event in batch.events] == [PagesStored, PagesStored, PagesRemoved, CacheCleared]
    assert batch.data_parallel_rank == 1
    assert msgspec.msgpack.encode(batch) == raw


def test_vllm_decodes_the_events() -> None:
    vllm = pytest.importorskip("vllm.distributed.kv_events")
    raw = FIXTURE.read_bytes()
    ours = msgspec.msgpack.encode(msgspec.msgpack.decode(raw, type=EventBatch))
    batch = msgspec.msgpack.decode(ours, type=vllm.KVEventBatch)
    assert [type(event).__name__ for event in batch.events] == [
        *("BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared")
    ]
    assert msgspec.msgpack.encode(batch) == raw
