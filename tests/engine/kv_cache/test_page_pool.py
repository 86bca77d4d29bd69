from __future__ import annotations

import pytest

from jaxserve.engine.kv_cache.page_pool import PagePool


def test_pages_are_allocated_and_released() -> None:
    pool = PagePool(4, 16)
    pages = pool.allocate(3)
    assert len(set(pages)) == 3
    assert pool.num_free == 1
    pool.release(pages[:2])
    assert pool.num_free == 3
    assert pool.check(pages[2:]) == []
    assert sorted([*pool.allocate(3), pages[2]]) == [0, 1, 2, 3]


def test_pages_for_rounds_up() -> None:
    pool = PagePool(4, 16)
    assert [pool.pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_misuse_fails_an_assertion() -> None:
    pool = PagePool(2, 16)
    with pytest.raises(AssertionError):
        pool.allocate(3)
    with pytest.raises(AssertionError, match="page 0 is free already"):
        pool.release([0])


def test_check_reports_leaked_and_duplicate_pages() -> None:
    pool = PagePool(3, 16)
    [page] = pool.allocate(1)
    assert pool.check([]) == [f"page {page} has 0 owners and is free 0 times"]
    assert pool.check([page, page]) == [f"page {page} has 2 owners and is free 0 times"]
    pool._free.append(page)
    assert pool.check([page]) == [f"page {page} has 1 owners and is free 1 times"]
