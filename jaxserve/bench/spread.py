"""How far a ratio of two measurements can be trusted: the bootstrap over a run's requests, Welch's interval over runs.

Pure numbers in, intervals out; it knows no metrics and no files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

DRAWS = 1000


@dataclasses.dataclass(frozen=True)
class Interval:
    """A ratio and between which bounds it lies at the confidence asked for."""

    ratio: float
    low: float
    high: float


def resampled_indices(size: int, block: int, *, draws: int, seed: int) -> np.ndarray:
    """`[draws, size]` indices, drawn with replacement in runs of `block` neighbours (the circular block bootstrap,
    Politis and Romano 1992): what requests share with those beside them stays in the spread."""
    block = max(1, min(block, size))
    count = -(-size // block)
    starts = np.random.default_rng(seed).integers(0, size, (draws, count))
    indices = (starts[:, :, None] + np.arange(block)) % size
    return indices.reshape(draws, count * block)[:, :size]


def ratio_of_draws(a: np.ndarray, b: np.ndarray, ratio: float, confidence: float) -> Interval:
    """The ratio B/A with the quantiles of its independent draws around it."""
    ratios = np.log(b) - np.log(a)
    edge = (1.0 - confidence) / 2.0
    low, high = np.quantile(ratios[np.isfinite(ratios)], [edge, 1.0 - edge])
    return Interval(ratio, min(ratio, math.exp(low)), max(ratio, math.exp(high)))


def ratio_of_runs(a: Sequence[float], b: Sequence[float], confidence: float) -> Interval | None:
    """The ratio B/A of geometric means over repeated runs, with Welch's t interval of their logarithms.

    A side with one run borrows the spread of the other; None where neither has two. Values must be above 0.
    """
    logs_a, logs_b = np.log(a), np.log(b)
    n_a, n_b = len(logs_a), len(logs_b)
    if max(n_a, n_b) < 2:
        return None
    if min(n_a, n_b) < 2:
        variance, freedom = float(np.var(logs_a if n_a > 1 else logs_b, ddof=1)), max(n_a, n_b) - 1.0
        error = variance * (1 / n_a + 1 / n_b)
    else:
        part_a, part_b = float(np.var(logs_a, ddof=1)) / n_a, float(np.var(logs_b, ddof=1)) / n_b
        error = part_a + part_b
        freedom = error**2 / (part_a**2 / (n_a - 1) + part_b**2 / (n_b - 1)) if error > 0 else math.inf
    middle = float(logs_b.mean() - logs_a.mean())
    reach = _t_quantile(freedom, 0.5 + confidence / 2) * math.sqrt(error) if error > 0 else 0.0
    return Interval(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))


def _t_quantile(freedom: float, probability: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))
