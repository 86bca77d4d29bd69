"""The figures of known distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxserve.bench.accuracy.figures import MIN_WINDOWS, compare, kl_lower_bounds, same_top1
from jaxserve.bench.accuracy.scores import WindowScores


def scores(rows: list[dict[int, float]], own: list[int]) -> WindowScores:
    """Return the scores of positions with these probabilities by token; `own` are the window's tokens."""
    longest = max(map(len, rows))
    tokens = [[*row, *[-1] * (longest - len(row))] for row in rows]
    logprobs = [[*map(math.log, row.values()), *[-math.inf] * (longest - len(row))] for row in rows]
    at = [math.log(row[token]) for row, token in zip(rows, own)]
    return WindowScores(np.array(at), np.array(tokens, np.int32), np.array(logprobs))


def test_kl_of_whole_distributions_is_exact() -> None:
    base = scores([{0: 0.5, 1: 0.25, 2: 0.25}], [0])
    other = scores([{2: 0.25, 0: 0.25, 1: 0.5}], [0])
    bounds, compared = kl_lower_bounds(base, other)
    assert bounds == pytest.approx([0.5 * math.log(2) + 0.25 * math.log(0.5)], rel=1e-4)
    assert compared == pytest.approx([1.0])
    assert kl_lower_bounds(base, base)[0] == pytest.approx([0.0])


def test_all_tokens_that_are_not_in_both_lists_are_one_outcome() -> None:
    base = scores([{0: 0.5, 1: 0.25}], [0])
    other = scores([{0: 0.25, 7: 0.5, 8: 0.1}], [0])
    bounds, compared = kl_lower_bounds(base, other)
    assert bounds == pytest.approx([0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)])
    assert compared == pytest.approx([0.5])


def test_kl_is_a_lower_bound_that_grows_with_the_lists() -> None:
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.ones(50)), rng.dirichlet(np.ones(50))
    exact = float((p * np.log(p / q)).sum())

    def bound(k: int) -> float:
        lists = ({int(i): float(side[i]) for i in np.argsort(-side)[:k]} for side in (p, q))
        base, other = (scores([top], [next(iter(top))]) for top in lists)
        return float(kl_lower_bounds(base, other)[0][0])

    bounds = [bound(k) for k in (10, 20, 40, 50)]
    assert bounds == sorted(bounds)
    assert 0 < bounds[0] < exact
    assert bounds[-1] == pytest.approx(exact, rel=1e-4)


def test_a_rounded_sum_above_one_is_no_divergence() -> None:
    full = scores([{0: 0.6, 1: 0.4000003}], [0])
    assert kl_lower_bounds(full, full)[0].tolist() == [0.0]


def test_top1_agreement_counts_ties_as_equal() -> None:
    base = scores([{0: 0.4, 1: 0.4}, {0: 0.5, 1: 0.3}, {3: 0.9}], [0, 0, 3])
    other = scores([{1: 0.5, 0: 0.2}, {1: 0.5, 0: 0.3}, {3: 0.8}], [0, 0, 3])
    assert same_top1(base, other).tolist() == [True, False, True]


def test_perplexities_and_the_largest_difference() -> None:
    base = [scores([{5: 0.5}, {5: 0.5}], [5, 5]), scores([{5: 0.125}, {5: 0.125}], [5, 5])]
    other = [scores([{5: 0.5}, {5: 0.25}], [5, 5]), scores([{5: 0.125}, {5: 0.03125}], [5, 5])]
    found = compare(base, other)
    assert found.num_scored_tokens == 4
    assert found.base_perplexity.value == pytest.approx(4.0)
    assert found.other_perplexity.value == pytest.approx(2 ** (2 + 3 / 4))
    assert found.perplexity_ratio.value == pytest.approx(2 ** (3 / 4))
    assert found.base_perplexity.low is None, "two windows are too few for an interval"
    largest = found.largest_difference
    assert (largest.window, largest.position) == (1, 2)
    assert (math.exp(largest.base), math.exp(largest.other)) == pytest.approx((0.125, 0.03125))


def test_the_interval_of_the_ratio_compares_the_same_windows() -> None:
    """Windows differ far more than the sides do, so independent draws would not see a difference of 1 percent."""
    rng = np.random.default_rng(2)
    chances = rng.uniform(0.01, 0.9, 2 * MIN_WINDOWS)
    base = [scores([{0: chance}], [0]) for chance in chances]
    other = [scores([{0: chance * 0.99}], [0]) for chance in chances]
    found = compare(base, other)
    ratio, perplexity = found.perplexity_ratio, found.base_perplexity
    assert ratio.low is not None
    assert ratio.high is not None
    assert perplexity.low is not None
    assert perplexity.high is not None
    assert 1.0 < ratio.low <= ratio.value <= ratio.high
    assert perplexity.high / perplexity.low > 1.2
    assert compare(base, other) == found, "the draws are the same every time"
