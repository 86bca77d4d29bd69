from __future__ import annotations

import pytest

from jaxserve.engine.pages import PagePool


def test_a_shared_page_is_free_when_its_last_owner_leaves() -> None:
    pool = PagePool(4, 16)
    pages = pool.allocate(3)
    assert len(set(pages)) == 3
    assert pool.usage == 0.75
    pool.share(pages[:1])
    pool.release(pages)
    assert pool.num_free == 3
    assert pool.check(pages[:1]) == []
    pool.release(pages[:1])
    assert pool.num_free == 4
    assert pool.check([]) == []


def test_pages_for_rounds_up() -> None:
    pool = PagePool(4, 16)
    assert [pool.pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_misuse_is_an_error_of_ours() -> None:
    pool = PagePool(2, 16)
    with pytest.raises(AssertionError):
        pool.allocate(3)
    with pytest.raises(AssertionError, match="page 0 has no owner"):
        pool.release([0])
    with pytest.raises(AssertionError, match="page 0 is free"):
        pool.share([0])


def test_check_names_leaks_and_double_frees() -> None:
    pool = PagePool(3, 16)
    page = pool.allocate_one()
    assert pool.check([]) == [f"page {page} counts 1 owners but has 0"]
    pool._free.append(page)
    assert f"page {page} is free and owned" in pool.check([page])
    pool._free.append(page)
    assert "the free list names 1 pages twice" in pool.check([page])
