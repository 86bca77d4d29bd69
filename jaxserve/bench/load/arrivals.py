"""Arrival times: all at once, a Poisson or gamma process, or a rate that ramps up."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np

from jaxserve.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class RampUp:
    """A request rate that changes from `start` to `end` requests per second over the run."""

    strategy: Literal["linear", "exponential"]
    start: float
    end: float

    def __post_init__(self) -> None:
        if not (self.start > 0 and self.end > 0 and math.isfinite(self.start) and math.isfinite(self.end)):
            raise ConfigError(
                "--ramp-up-start-rps and --ramp-up-end-rps must be finite and above 0, "
                f"got {self.start:g} and {self.end:g}"
            )

    def rate(self, share: float) -> float:
        """Return the rate after this share (0 to 1) of the requests."""
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * share
        return float(self.start * (self.end / self.start) ** share)

    def as_json(self) -> dict[str, str | float]:
        """Return the fields under the key names of vLLM's results."""
        return {"strategy": self.strategy, "start_rps": self.start, "end_rps": self.end}


def arrival_times(
    rng: np.random.Generator, count: int, rate: float, *, burstiness: float = 1.0, ramp_up: RampUp | None = None
) -> list[float]:
    """Return the seconds since the start at which each of `count` requests is sent.

    Gaps are drawn from a gamma distribution of shape `burstiness`: 1 is a Poisson process, smaller values are
    burstier, larger ones more even, and infinity is exactly even. At a constant rate the gaps are scaled so that the
    last request is sent after exactly count / rate seconds, as vLLM's tool does. Raises `ConfigError`.
    """
    if not rate > 0:
        raise ConfigError(f"--request-rate must be above 0 (or inf), got {rate:g}")
    if not burstiness > 0:
        raise ConfigError(f"--burstiness must be above 0, got {burstiness:g}")
    if ramp_up is None and math.isinf(rate):
        return [0.0] * count
    rates = [ramp_up.rate(i / max(count - 1, 1)) if ramp_up else rate for i in range(count)]
    drawn = np.ones(count) if math.isinf(burstiness) else rng.gamma(burstiness, 1 / burstiness, count)
    times = np.cumsum(drawn / np.array(rates))
    if ramp_up is None and count:
        times *= count / rate / times[-1]
    return [float(time) for time in times]
