"""The noise of a draw is exponential, finite, and independent by key and by token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import chdtri

from pallas_kernels.sampling import exponential_noise

CELLS = 256


def _chi_squared_is_plausible(counts: np.ndarray) -> bool:
    expected = counts.sum() / counts.size
    statistic = float(((counts - expected) ** 2 / expected).sum())
    low, high = chdtri(counts.size - 1, [1 - 1e-5, 1e-5])
    return low < statistic < high


@pytest.fixture(scope="module")
def drawn() -> np.ndarray:
    keys = np.random.default_rng(0).integers(0, 2**32, (64, 2), np.uint32)
    return np.asarray(jax.jit(exponential_noise)(keys, jnp.arange(1 << 15, dtype=jnp.uint32)))


def test_the_noise_is_exponential(drawn: np.ndarray) -> None:
    assert (drawn > 0).all()
    assert np.isfinite(drawn).all()
    cells = np.floor(-np.expm1(-drawn.astype(np.float64)) * CELLS).astype(int)
    assert _chi_squared_is_plausible(np.bincount(cells.ravel(), minlength=CELLS))
    # Small numbers, which win: of 2 million, about one in 4096 lies below 2^-12, uniformly
    small = drawn[drawn < 2.0**-12].astype(np.float64) * 2.0**12
    assert abs(small.size - drawn.size / 4096) < 5 * np.sqrt(drawn.size / 4096)
    assert _chi_squared_is_plausible(np.bincount((small * 8).astype(int), minlength=8))


@pytest.mark.parametrize("step", [(0, 1), (1, 0), (0, 2), (0, 64), (0, 1024)], ids=str)
def test_neighbours_are_independent(drawn: np.ndarray, step: tuple[int, int]) -> None:
    """Compare ranks in 16ths of pairs of tokens at some distance, and of rows with other keys."""
    ranks = np.floor(-np.expm1(-drawn.astype(np.float64)) * 16).astype(int)
    rows, columns = step
    pairs = ranks[: len(ranks) - rows, : ranks.shape[1] - columns] * 16 + ranks[rows:, columns:]
    assert _chi_squared_is_plausible(np.bincount(pairs.ravel(), minlength=256))


def test_every_bit_of_a_key_changes_the_noise() -> None:
    bits = [(1 << bit, 0) for bit in range(32)] + [(0, 1 << bit) for bit in range(32)]
    keys = np.array([(0, 0), *bits], np.uint32)
    drawn = np.asarray(exponential_noise(keys, jnp.arange(512, dtype=jnp.uint32)))
    for other in drawn[1:]:
        assert (other != drawn[0]).mean() > 0.99
        assert abs(np.corrcoef(other, drawn[0])[0, 1]) < 0.25
