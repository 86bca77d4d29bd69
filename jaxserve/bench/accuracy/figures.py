"""Compares the scores that two servers gave the same windows: perplexities, top-1 agreement, KL divergence.

Windows are resampled for confidence intervals. Both sides are resampled alike, because a hard window is hard for both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxserve.bench.accuracy.scores import WindowScores
from jaxserve.bench.results.intervals import DRAWS, resampled_indices

CONFIDENCE = 0.95
MIN_WINDOWS = 10
"""With fewer windows there are no intervals: draws from so few show too little spread."""

# Log probabilities come as 32-bit numbers, so that the sum of a list may exceed 1 by about this much.
_ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure with its confidence bounds, which are None with fewer than `MIN_WINDOWS` windows."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class LogprobDifference:
    """The log probabilities of token `position` of window number `window`, both counted from 0."""

    window: int
    position: int
    base: float
    other: float


@dataclasses.dataclass(frozen=True)
class AccuracyComparison:
    """The figures. `perplexity_ratio` is other / base. `top1_agreement` is the share of positions where both sides have
    the same likeliest token. `kl_divergence` is a lower bound of KL(base || other), in nats per token; it is close if
    `compared_probability`, which base gives to the tokens that both sides list, is near 1."""

    num_scored_tokens: int
    base_perplexity: Figure
    other_perplexity: Figure
    perplexity_ratio: Figure
    top1_agreement: Figure
    kl_divergence: Figure
    compared_probability: Figure
    largest_difference: LogprobDifference


def compare(base: Sequence[WindowScores], other: Sequence[WindowScores], *, seed: int = 0) -> AccuracyComparison:
    """Compare the scores of the same windows, all of one size."""
    draws = None
    if len(base) >= MIN_WINDOWS:
        draws = resampled_indices(len(base), 1, draws=DRAWS, seed=seed)
    base_nll, other_nll = (np.array([-scores.logprobs.mean() for scores in side]) for side in (base, other))
    pairs = list(zip(base, other, strict=True))
    divergences = np.array([[part.mean() for part in kl_lower_bounds(*pair)] for pair in pairs])
    return AccuracyComparison(
        num_scored_tokens=sum(len(scores.logprobs) for scores in base),
        base_perplexity=_exp(_mean(base_nll, draws)),
        other_perplexity=_exp(_mean(other_nll, draws)),
        perplexity_ratio=_exp(_mean(other_nll - base_nll, draws)),
        top1_agreement=_mean(np.array([same_top1(*pair).mean() for pair in pairs]), draws),
        kl_divergence=_mean(divergences[:, 0], draws),
        compared_probability=_mean(divergences[:, 1], draws),
        largest_difference=_largest_difference(pairs),
    )


def same_top1(base: WindowScores, other: WindowScores) -> np.ndarray:
    """Return for each position whether a likeliest token of one side is a likeliest token of the other."""
    likeliest_base, likeliest_other = (
        side.top_logprobs == side.top_logprobs.max(axis=1, keepdims=True) for side in (base, other)
    )
    return (_same_tokens(base, other) & likeliest_base[:, :, None] & likeliest_other[:, None, :]).any(axis=(1, 2))


def kl_lower_bounds(base: WindowScores, other: WindowScores) -> tuple[np.ndarray, np.ndarray]:
    """Return for each position a lower bound of KL(base || other) in nats, and base's probability of the shared tokens.

    The bound is the divergence over the tokens that both lists have, with all others together as one more outcome:
    merging outcomes never increases a divergence (the data processing inequality).
    """
    same = _same_tokens(base, other)
    shared = same.any(axis=2)
    log_p = np.where(shared, base.top_logprobs, 0.0)
    log_q = np.where(same, other.top_logprobs[:, None, :], -np.inf).max(axis=2, where=same, initial=-np.inf)
    log_q = np.where(shared, log_q, 0.0)
    p, q = (np.where(shared, np.exp(log), 0.0) for log in (log_p, log_q))
    rest_p, rest_q = (np.maximum(1.0 - side.sum(axis=1), _ROUNDING) for side in (p, q))
    bounds = (p * (log_p - log_q)).sum(axis=1) + rest_p * np.log(rest_p / rest_q)
    return np.maximum(bounds, 0.0), p.sum(axis=1)


def _same_tokens(base: WindowScores, other: WindowScores) -> np.ndarray:
    """Return `[positions, k of base, k of other]`: whether two entries of the lists are one token."""
    return (base.top_tokens[:, :, None] == other.top_tokens[:, None, :]) & (base.top_tokens[:, :, None] >= 0)


def _largest_difference(pairs: Sequence[tuple[WindowScores, WindowScores]]) -> LogprobDifference:
    differences = np.array([np.abs(base.logprobs - other.logprobs) for base, other in pairs])
    window, row = (int(index) for index in np.unravel_index(differences.argmax(), differences.shape))
    base, other = pairs[window]
    return LogprobDifference(window, row + 1, float(base.logprobs[row]), float(other.logprobs[row]))


def _mean(by_window: np.ndarray, draws: np.ndarray | None) -> Figure:
    if draws is None:
        return Figure(float(by_window.mean()))
    edge = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(by_window[draws].mean(axis=1), [edge, 1.0 - edge])
    return Figure(float(by_window.mean()), float(low), float(high))


def _exp(figure: Figure) -> Figure:
    with np.errstate(over="ignore"):
        low, high = (None if bound is None else float(np.exp(bound)) for bound in (figure.low, figure.high))
        return Figure(float(np.exp(figure.value)), low, high)
