"""A run's metrics over its requests drawn anew: how far each would have come out otherwise, within the run.

Requests are drawn in blocks of neighbours, as many as ran at once, because those share their steps.
"""

from __future__ import annotations

import numpy as np

from jaxserve.bench.results.intervals import DRAWS, resampled_indices
from jaxserve.bench.results.run_file import Requests, RunFile

# A quantile's spread can't be seen when fewer values than this lie beyond it.
_BEYOND = 5
# At least so many blocks; with fewer, no two draws differ enough to speak of a spread.
_BLOCKS = 5
# Gaps between tokens that are looked at for the spread of their quantiles; more only cost time.
_MAX_GAPS = 50_000


def draws(run: RunFile, metric: str, *, seed: int) -> np.ndarray | str:
    """`[DRAWS]` values of a metric of one run, or why there are none."""
    if run.latencies is not None:
        return _of_values(run.latencies, metric.removesuffix("_latency"), seed, block=1)
    requests = run.requests
    if requests is None:
        return "no raw requests in the file (`vllm bench serve` writes them with --save-detailed)"
    if len(requests) < 2 * _BLOCKS:
        return f"{len(requests)} requests are too few for a spread"
    block = max(1, min(round(run.in_flight), len(requests) // _BLOCKS))
    if not metric.endswith("_ms"):
        return _of_rate(requests, metric, run.in_flight, block, seed)
    statistic, quantity, _ = metric.split("_")
    if quantity == "itl":
        return _of_gaps(requests, statistic, block, seed)
    values: np.ndarray = getattr(requests, quantity)
    return _of_values(values[~np.isnan(values)], statistic, seed, block)


def _of_values(values: np.ndarray, statistic: str, seed: int, block: int) -> np.ndarray | str:
    quantile = _quantile(statistic)
    problem = _too_few(len(values), quantile)
    if problem:
        return problem
    drawn = values[resampled_indices(len(values), block, draws=DRAWS, seed=seed)]
    return drawn.mean(axis=1) if quantile is None else np.quantile(drawn, quantile, axis=1)


def _of_rate(requests: Requests, metric: str, in_flight: float, block: int, seed: int) -> np.ndarray | str:
    """A rate is what a second of one request brings, times how many are in flight: the first is drawn anew."""
    if metric == "request_goodput":
        return "goodput has no spread within a run; give several runs"
    chosen = resampled_indices(len(requests), block, draws=DRAWS, seed=seed)
    seconds = requests.e2el[chosen].sum(axis=1)
    if metric == "request_throughput":
        return len(requests) / seconds * in_flight
    tokens = requests.output_tokens + (requests.input_tokens if metric.startswith("total") else 0)
    return tokens[chosen].sum(axis=1) / seconds * in_flight


def _of_gaps(requests: Requests, statistic: str, block: int, seed: int) -> np.ndarray | str:
    stride = -(-len(requests.itl) // _MAX_GAPS)
    owners = np.repeat(np.arange(len(requests)), requests.num_gaps)[::stride]
    gaps = requests.itl[::stride]
    quantile = _quantile(statistic)
    problem = _too_few(len(gaps), quantile)
    if problem:
        return problem
    order = np.argsort(gaps)
    gaps, owners = gaps[order], owners[order]
    drawn = np.empty(DRAWS)
    for i, chosen in enumerate(resampled_indices(len(requests), block, draws=DRAWS, seed=seed)):
        weights = np.bincount(chosen, minlength=len(requests))[owners]
        if quantile is None:
            drawn[i] = np.average(gaps, weights=weights)
        else:
            below = np.cumsum(weights)
            drawn[i] = gaps[np.searchsorted(below, quantile * below[-1])]
    return drawn


def _quantile(statistic: str) -> float | None:
    """Of `p99` 0.99, of `median` 0.5; None for means."""
    if statistic in ("mean", "avg"):
        return None
    return 0.5 if statistic == "median" else float(statistic.removeprefix("p")) / 100


def _too_few(count: int, quantile: float | None) -> str:
    if count < 2 * _BLOCKS:
        return f"{count} values are too few for a spread"
    if quantile is not None and count * min(quantile, 1 - quantile) < _BEYOND:
        return f"of {count} values fewer than {_BEYOND} lie beyond this quantile: too few for a spread"
    return ""
