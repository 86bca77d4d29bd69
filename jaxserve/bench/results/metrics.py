"""Computes the figures of a run from its records, under vLLM's key names.

Only successful requests are averaged; the others are counted. TTFT is the time from sending to the first token, ITL the
time between chunks, TPOT the time after the first token divided by the tokens after it, E2EL the time to the last
token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.bench.load.records import RequestRecord
from jaxserve.bench.load.run_load import LoadResult

METRICS = ("ttft", "tpot", "itl", "e2el")


def compute_figures(
    run: LoadResult,
    *,
    goodput: Mapping[str, float] | None = None,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (50, 90, 95, 99),
) -> dict[str, Any]:
    """Return the figures. `goodput` has limits in milliseconds by metric; latencies without values are left out."""
    done = [record for record in run.records if record.status == "ok"]
    seconds = run.duration
    outputs = sum(record.output_tokens for record in done)
    inputs = sum(record.prompt_tokens or 0 for record in done)
    figures: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": sum(record.status == "failed" for record in run.records),
        "unfinished": sum(record.status == "unfinished" for record in run.records),
        "interrupted": run.interrupted,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_output_tokens_per_s": _peak_tokens_per_second(done),
        "max_concurrent_requests": _peak_open(run.records),
        "counted_by": dict(Counter(record.counted_by for record in done)),
    }
    if goodput:
        figures["request_goodput"] = sum(_is_good(record, goodput) for record in done) / seconds
    for metric in metrics:
        figures |= _spread(metric, _values(metric, done), percentiles)
    return figures


def percentile_key(percentile: float) -> str:
    """Return `p99`, `p99.9`."""
    return f"p{percentile:g}"


def _values(metric: str, done: Sequence[RequestRecord]) -> list[float]:
    if metric == "itl":
        return [itl for record in done for itl in record.itls]
    values = [getattr(record, metric) for record in done]
    return [value for value in values if value is not None]


def _spread(metric: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    milliseconds = 1e3 * np.array(values)
    figures = {
        f"mean_{metric}_ms": float(milliseconds.mean()),
        f"median_{metric}_ms": float(np.median(milliseconds)),
        f"std_{metric}_ms": float(milliseconds.std()),
    }
    for percentile in percentiles:
        figures[f"{percentile_key(percentile)}_{metric}_ms"] = float(np.percentile(milliseconds, percentile))
    return figures


def _is_good(record: RequestRecord, goodput: Mapping[str, float]) -> bool:
    """Return whether the request met all limits; one with a single token has no TPOT and meets that limit."""
    return all((getattr(record, metric) or 0.0) * 1e3 <= limit for metric, limit in goodput.items())


def _peak_tokens_per_second(done: Sequence[RequestRecord]) -> float:
    """Return the tokens of the busiest second since the first request; a chunk counts as its share of the tokens."""
    if not done:
        return 0.0
    first = min(record.start for record in done)
    tokens: dict[int, float] = {}
    for record in done:
        share = record.output_tokens / len(record.token_times)
        for time in record.token_times:
            second = math.floor(time - first)
            tokens[second] = tokens.get(second, 0.0) + share
    return max(tokens.values(), default=0.0)


def _peak_open(records: Sequence[RequestRecord]) -> int:
    """Return the most requests that were open at one time."""
    sent = [record for record in records if record.start]
    changes = sorted([(record.start, 1) for record in sent] + [(record.end, -1) for record in sent])
    most = current = 0
    for _, change in changes:
        current += change
        most = max(most, current)
    return most
