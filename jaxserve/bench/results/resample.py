"""Bootstrap of a run's metrics: recomputes each over resampled requests to estimate its spread within the run.

Each draw takes a block of consecutive requests, as long as the number that ran at once: they share their engine steps.
"""

from __future__ import annotations

import numpy as np

from jaxserve.bench.results.intervals import DRAWS, resampled_indices
from jaxserve.bench.results.run_file import RawRequests, RunFile

# A quantile's spread can't be estimated with fewer values than this beyond it.
_MIN_BEYOND = 5
# With fewer blocks, draws hardly differ and show no spread.
_MIN_BLOCKS = 5
# This many gaps between tokens are enough to estimate the spread of their quantiles; more only cost time.
_MAX_GAPS = 50_000


def resample_metric(run: RunFile, metric: str, *, seed: int) -> np.ndarray | str:
    """Return `[DRAWS]` resampled values of a metric of one run, or the reason why there are none."""
    if run.latencies is not None:
        return _resample_values(run.latencies, metric.removesuffix("_latency"), seed, block=1)
    requests = run.requests
    if requests is None:
        return "no raw requests in the file (`vllm bench serve` writes them with --save-detailed)"
    if len(requests) < 2 * _MIN_BLOCKS:
        return f"{len(requests)} requests are too few for a spread"
    block = max(1, min(round(run.in_flight), len(requests) // _MIN_BLOCKS))
    if not metric.endswith("_ms"):
        return _resample_rate(requests, metric, run.in_flight, block, seed)
    statistic, quantity, _ = metric.split("_")
    if quantity == "itl":
        return _resample_gaps(requests, statistic, block, seed)
    values: np.ndarray = getattr(requests, quantity)
    return _resample_values(values[~np.isnan(values)], statistic, seed, block)


def _resample_values(values: np.ndarray, statistic: str, seed: int, block: int) -> np.ndarray | str:
    quantile = _quantile(statistic)
    problem = _too_few(len(values), quantile)
    if problem:
        return problem
    drawn = values[resampled_indices(len(values), block, draws=DRAWS, seed=seed)]
    return drawn.mean(axis=1) if quantile is None else np.quantile(drawn, quantile, axis=1)


def _resample_rate(requests: RawRequests, metric: str, in_flight: float, block: int, seed: int) -> np.ndarray | str:
    """Resample the rate per second of one request, and multiply it by the requests in flight."""
    if metric == "request_goodput":
        return "goodput has no spread within a run; give several runs"
    chosen = resampled_indices(len(requests), block, draws=DRAWS, seed=seed)
    seconds = requests.e2el[chosen].sum(axis=1)
    if metric == "request_throughput":
        return len(requests) / seconds * in_flight
    tokens = requests.output_tokens + (requests.input_tokens if metric.startswith("total") else 0)
    return tokens[chosen].sum(axis=1) / seconds * in_flight


def _resample_gaps(requests: RawRequests, statistic: str, block: int, seed: int) -> np.ndarray | str:
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
    """Return 0.99 for `p99`, 0.5 for `median`, None for means."""
    if statistic in ("mean", "avg"):
        return None
    return 0.5 if statistic == "median" else float(statistic.removeprefix("p")) / 100


def _too_few(count: int, quantile: float | None) -> str:
    if count < 2 * _MIN_BLOCKS:
        return f"{count} values are too few for a spread"
    if quantile is not None and count * min(quantile, 1 - quantile) < _MIN_BEYOND:
        return f"of {count} values fewer than {_MIN_BEYOND} lie beyond this quantile: too few for a spread"
    return ""
