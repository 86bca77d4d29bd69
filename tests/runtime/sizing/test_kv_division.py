from __future__ import annotations

import dataclasses

from jaxserve.runtime.sizing.kv_division import KVDivision, expected_tokens

# Of requests of 100 pages, each holds 5 pages of the window group: 64 tokens and a page that the window begins within.
DIVISION = KVDivision(
    bytes_per_token=(10, 50), windows=(None, 64), page_size=16, expected_tokens=1600, max_running=8, chunk=32
)


def test_a_window_group_holds_the_windows_of_as_many_requests_and_a_chunk() -> None:
    assert DIVISION.pages(400) == (400, 4 * 5 + 2)
    assert DIVISION.pages(401) == (401, 4 * 5 + 1 + 2)
    assert DIVISION.pages(10**6) == (10**6, 8 * 5 * 5 // 4 + 2), "what all requests need, and a quarter more"


def test_a_window_group_has_room_for_one_request_and_its_chunk() -> None:
    assert DIVISION.pages(50) == (50, 4 + 2 + 2)
    assert DIVISION.pages(7) == (7, 7), "each of its pages goes with a page of the first group"
    assert DIVISION.pages(0) == (0, 0)


def test_a_ratio_decides_instead() -> None:
    by_ratio = dataclasses.replace(DIVISION, ratio=0.25)
    assert by_ratio.pages(400) == (400, 100)
    assert by_ratio.pages(3) == (3, 0)


def test_bytes_count_all_groups() -> None:
    assert DIVISION.nbytes(400) == 16 * (400 * 10 + 22 * 50)


def test_the_largest_pool_is_the_last_one_that_fits() -> None:
    for first in (1, 7, 8, 50, 399, 400, 5000):
        taken = DIVISION.nbytes(first)
        assert DIVISION.largest_in(taken, 10**9) == first
        assert DIVISION.largest_in(taken - 1, 10**9) == first - 1
        assert DIVISION.largest_in(taken, first - 1) == first - 1
    assert DIVISION.largest_in(-1, 100) == 0
    assert DIVISION.largest_in(100, 0) == 0


def test_no_group_exceeds_its_limit() -> None:
    assert DIVISION.largest_within((300, 10**9), 10**9) == 300
    most = DIVISION.largest_within((10**9, 30), 10**9)
    assert (DIVISION.pages(most)[1], DIVISION.pages(most + 1)[1]) == (30, 31)
    assert DIVISION.largest_within((10**9, 10**9), 77) == 77


def test_the_expected_request_is_half_the_context_and_at_least_a_window() -> None:
    assert expected_tokens(8192, [None, 1024], whole_sequences=True, context_is_set=True) == 4096
    assert expected_tokens(131072, [None, 1024], whole_sequences=True, context_is_set=True) == 16384
    assert expected_tokens(131072, [None, 1024], whole_sequences=True, context_is_set=False) == 4096
    assert expected_tokens(131072, [None, 32768, 512], whole_sequences=True, context_is_set=True) == 32768
    assert expected_tokens(1, [None], whole_sequences=True, context_is_set=True) == 1
    assert expected_tokens(8192, [None, 1024], whole_sequences=False, context_is_set=True) == 8192
