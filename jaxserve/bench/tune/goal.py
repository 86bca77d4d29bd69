"""The goal of `bench tune`, as one score per run; higher is better."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxserve.bench.results.run_file import as_run
from jaxserve.errors import BenchRunError, ConfigError

_LIMITS = ("ttft", "tpot", "e2el")


@dataclasses.dataclass(frozen=True)
class Goal:
    """`throughput` scores output tokens per second; `latency` requests per second that meet all `limits` (in ms)."""

    name: Literal["throughput", "latency"]
    limits: Mapping[str, float]

    @property
    def unit(self) -> str:
        """The unit of the score."""
        if self.name == "throughput":
            return "output tokens/s"
        return "requests/s within " + ", ".join(f"{name} {limit:g} ms" for name, limit in self.limits.items())

    def score(self, result: Mapping[str, Any]) -> float:
        """Return the score, always above 0: if no request met the limits, half a request counts, so that ratios
        exist."""
        if self.name == "throughput":
            return float(result["output_throughput"])
        run = as_run("the run's result", result)
        if run.requests is None:
            raise BenchRunError("the result has no raw requests to compare with the limits")
        good = np.ones(len(run.requests), bool)
        for name, limit in self.limits.items():
            # A request of one token has no TPOT (NaN) and meets that limit.
            good &= np.nan_to_num(getattr(run.requests, name)) * 1e3 <= limit
        return max(float(good.sum()), 0.5) / run.duration


def read_goal(name: str, limits: Sequence[str]) -> Goal:
    """Parse `--goal` and `--limit ttft:200 tpot:50`. Raises `ConfigError`."""
    if name == "throughput":
        if limits:
            raise ConfigError("--limit belongs to --goal latency; throughput has none")
        return Goal("throughput", {})
    found: dict[str, float] = {}
    for text in limits:
        metric, _, number = text.partition(":")
        try:
            found[metric] = float(number)
        except ValueError:
            found[metric] = 0.0
        if metric not in _LIMITS or not 0 < found[metric] < float("inf"):
            raise ConfigError(f"--limit {text} must be METRIC:MILLISECONDS, the metric one of {', '.join(_LIMITS)}")
    if not found:
        raise ConfigError("--goal latency needs limits, such as --limit ttft:200 tpot:50")
    return Goal("latency", found)
