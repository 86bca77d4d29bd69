"""Confidence intervals for a ratio of two measurements: bootstrap over a run's requests, Student's t over runs.

The functions are pure and take numbers; metrics and files are handled elsewhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

DRAWS = 1000


@dataclasses.dataclass(frozen=True)
class Interval:
    """A ratio with its confidence bounds."""

    ratio: float
    low: float
    high: float


def resampled_indices(size: int, block: int, *, draws: int, seed: int) -> np.ndarray:
    """Draw `[draws, size]` indices with replacement, in runs of `block` neighbours (the circular block bootstrap,
    Politis and Romano 1992): this keeps the correlation of neighbouring requests."""
    block = max(1, min(block, size))
    count = -(-size // block)
    starts = np.random.default_rng(seed).integers(0, size, (draws, count))
    indices = (starts[:, :, None] + np.arange(block)) % size
    return indices.reshape(draws, count * block)[:, :size]


def ratio_of_draws(a: np.ndarray, b: np.ndarray, ratio: float, confidence: float) -> Interval:
    """Return the ratio B/A with the quantiles of its independent draws as bounds."""
    ratios = np.log(b) - np.log(a)
    edge = (1.0 - confidence) / 2.0
    low, high = np.quantile(ratios[np.isfinite(ratios)], [edge, 1.0 - edge])
    return Interval(ratio, min(ratio, math.exp(low)), max(ratio, math.exp(high)))


def ratio_of_runs(a: Sequence[float], b: Sequence[float], confidence: float) -> Interval | None:
    """Return the ratio B/A of geometric means over repeated runs, with Student's t interval of their logarithms.

    Assumes equal variance, because a few runs can't show a difference in it; so a side with one run gets the variance
    of the other. Returns None if neither side has two runs. Values must be above 0.
    """
    logs_a, logs_b = np.log(a), np.log(b)
    freedom = len(a) + len(b) - 2
    if freedom < 1:
        return None
    squares = float(((logs_a - logs_a.mean()) ** 2).sum() + ((logs_b - logs_b.mean()) ** 2).sum())
    error = math.sqrt(squares / freedom * (1 / len(a) + 1 / len(b)))
    middle = float(logs_b.mean() - logs_a.mean())
    reach = _t_quantile(freedom, 0.5 + confidence / 2) * error
    return Interval(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))


def _t_quantile(freedom: int, probability: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))
