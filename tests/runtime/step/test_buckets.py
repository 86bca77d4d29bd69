"""The sizes of programs: MISSION.md's rule for `--cuda-graph-max-bs`, and sizes that must always exist."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.runtime.step.buckets import decode_buckets, fine_decode_rows, smallest_fitting, token_buckets


def _fine(max_running: int, max_fine: int) -> tuple[int, ...]:
    return decode_buckets(max_running, max_fine=max_fine, requested=None)


def test_finely_spaced_up_to_the_limit_then_powers_of_two() -> None:
    assert _fine(256, 160) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 256)
    assert _fine(1024, 32) == (1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512, 1024)
    assert _fine(300, 256)[-4:] == (192, 224, 256, 300)
    assert _fine(2048, 704)[-5:] == (640, 672, 704, 1024, 2048)


def test_the_limit_itself_has_a_program() -> None:
    assert _fine(512, 100) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 100, 128, 256, 512)
    assert _fine(64, 3) == (1, 2, 3, 4, 8, 16, 32, 64)
    assert _fine(4, 1) == (1, 2, 4)


def test_requested_sizes_replace_the_spacing_and_the_batch_always_fits() -> None:
    assert decode_buckets(20, max_fine=160, requested=(3, 8, 64)) == (3, 8, 20)
    assert decode_buckets(20, max_fine=160, requested=(20,)) == (20,)


def test_a_cpu_has_few() -> None:
    assert decode_buckets(32, max_fine=None, requested=None) == (1, 8, 16, 32)
    assert decode_buckets(20, max_fine=None, requested=None) == (1, 8, 16, 20)
    assert decode_buckets(20, max_fine=16, requested=None) == (1, 2, 4, 8, 16, 20)
    assert decode_buckets(1, max_fine=None, requested=None) == (1,)


def test_mixed_sizes_double_up_to_the_budget() -> None:
    assert token_buckets(512, smallest=64) == (64, 128, 256, 512)
    assert token_buckets(100, smallest=32) == (32, 64, 100)
    assert token_buckets(16, smallest=64) == (16,)


@given(running=st.integers(1, 3000), fine=st.integers(1, 2000))
def test_any_batch_fits_and_wastes_little_within_the_limit(running: int, fine: int) -> None:
    buckets = _fine(running, fine)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == running
    for size in {1, 2, 5, 17, fine, fine - 1, fine // 2, running} & set(range(1, running + 1)):
        waste = smallest_fitting(buckets, size) - size
        assert waste < (32 if size <= fine else size)


def test_no_bucket_exceeds_the_batch() -> None:
    assert smallest_fitting((2, 8), 3) == 8
    with pytest.raises(AssertionError, match="9 is larger than every bucket"):
        smallest_fitting((2, 8), 9)


@pytest.mark.parametrize(
    ("max_fine", "requested", "rows"), [(160, None, 160), (None, None, 32), (160, (1, 8), 8), (None, (4, 16), 16)]
)
def test_the_end_of_the_fine_spacing(max_fine: int | None, requested: tuple[int, ...] | None, rows: int) -> None:
    assert fine_decode_rows(32, max_fine=max_fine, requested=requested) == rows
