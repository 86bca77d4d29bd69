"""Figures of a run from its records, under vLLM's key names.

Only requests that ended well are averaged; the others are counted. TTFT is from sending to the first token, ITL between
chunks as they arrived, TPOT the time after the first token by the tokens after the first, E2EL to the last token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.bench.load.records import Record
from jaxserve.bench.load.run_load import Run

METRICS = ("ttft", "tpot", "itl", "e2el")


def summary(
    run: Run,
    *,
    goodput: Mapping[str, float] | None = None,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (50, 90, 95, 99),
) -> dict[str, Any]:
    """The figures. `goodput` are limits in milliseconds by metric; a latency nobody measured is left out."""
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
        "max_output_tokens_per_s": _most_tokens_in_a_second(done),
        "max_concurrent_requests": _most_open(run.records),
        "counted_by": dict(Counter(record.counted_by for record in done)),
    }
    if goodput:
        figures["request_goodput"] = sum(_is_good(record, goodput) for record in done) / seconds
    for metric in metrics:
        figures |= _spread(metric, _values(metric, done), percentiles)
    return figures


def percentile_key(percentile: float) -> str:
    """`p99`, `p99.9`."""
    return f"p{percentile:g}"


def _values(metric: str, done: Sequence[Record]) -> list[float]:
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


def _is_good(record: Record, goodput: Mapping[str, float]) -> bool:
    """A single token has no TPOT, so no limit on it is missed."""
    return all((getattr(record, metric) or 0.0) * 1e3 <= limit for metric, limit in goodput.items())


def _most_tokens_in_a_second(done: Sequence[Record]) -> float:
    """In the fullest second since the first was sent; a chunk counts as its share of its request's tokens."""
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


def _most_open(records: Sequence[Record]) -> int:
    """Most requests that were open at one moment."""
    sent = [record for record in records if record.start]
    changes = sorted([(record.start, 1) for record in sent] + [(record.end, -1) for record in sent])
    most = current = 0
    for _, change in changes:
        current += change
        most = max(most, current)
    return most
