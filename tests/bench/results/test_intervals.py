from __future__ import annotations

import numpy as np
import pytest

from jaxserve.bench.results.intervals import ratio_of_draws, ratio_of_runs, resampled_indices


def test_blocks_of_neighbours_are_drawn() -> None:
    indices = resampled_indices(100, 10, draws=50, seed=0)
    assert indices.shape == (50, 100)
    blocks = indices.reshape(50, 10, 10)
    assert ((blocks[:, :, 1:] - blocks[:, :, :-1]) % 100 == 1).all()
    assert len(np.unique(indices)) == 100


def test_equal_distributions_are_rarely_called_different() -> None:
    """Of 400 pairs that differ only by noise, the 95 % interval should miss 1 about 20 times."""
    rng = np.random.default_rng(0)
    for runs in (2, 3, 5):
        pairs = (ratio_of_runs(*rng.lognormal(4.0, 0.05, (2, runs)), confidence=0.95) for _ in range(400))
        missed = sum(not pair.low <= 1.0 <= pair.high for pair in pairs if pair)
        assert missed < 40, runs


def test_a_true_difference_is_found() -> None:
    rng = np.random.default_rng(0)
    pairs = [ratio_of_runs(rng.lognormal(0, 0.01, 4), rng.lognormal(0.1, 0.01, 4), 0.99) for _ in range(50)]
    assert sum(pair.low > 1.0 for pair in pairs if pair) >= 48


def test_a_single_run_uses_the_spread_of_the_other_side() -> None:
    few, many = ratio_of_runs([100.0], [90.0, 110.0], 0.95), ratio_of_runs([100.0] * 2, [90.0, 110.0], 0.95)
    assert few is not None
    assert many is not None
    assert few.low < 0.5 < 2.0 < few.high, "one degree of freedom, and the single run's own noise on top"
    assert few.ratio == pytest.approx(many.ratio)
    assert ratio_of_runs([100.0], [110.0], 0.95) is None


def test_bounds_of_draws_contain_the_ratio() -> None:
    rng = np.random.default_rng(0)
    interval = ratio_of_draws(rng.normal(100, 1, 1000), rng.normal(110, 1, 1000), 1.1, 0.99)
    assert 1.05 < interval.low < 1.1 < interval.high < 1.15
