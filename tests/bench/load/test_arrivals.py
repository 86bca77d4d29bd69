from __future__ import annotations

import math

import numpy as np
import pytest

from jaxserve.bench.load.arrivals import RampUp, arrival_times
from jaxserve.errors import ConfigError


def gaps(count: int, rate: float, **options: object) -> np.ndarray:
    times = arrival_times(np.random.default_rng(1), count, rate, **options)  # type: ignore[arg-type]
    return np.diff(np.array([0.0, *times]))


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(np.random.default_rng(0), 3, math.inf) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed_and_the_rate_is_met(burstiness: float) -> None:
    drawn = gaps(20_000, 50.0, burstiness=burstiness)
    assert drawn.sum() == pytest.approx(20_000 / 50)
    assert drawn.std() / drawn.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    assert (drawn >= 0).all()


def test_infinite_burstiness_is_even() -> None:
    assert gaps(10, 4.0, burstiness=math.inf) == pytest.approx(np.full(10, 0.25))


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 50.5), ("exponential", 10.0)])
def test_a_ramp_goes_from_one_rate_to_the_other(strategy: str, middle: float) -> None:
    ramp = RampUp(strategy, 1.0, 100.0)  # type: ignore[arg-type]
    rates = 1 / gaps(101, math.inf, burstiness=math.inf, ramp_up=ramp)
    assert (rates[0], rates[50], rates[-1]) == pytest.approx((1.0, middle, 100.0))


def test_the_same_seed_gives_the_same_times() -> None:
    first, second = (arrival_times(np.random.default_rng(5), 10, 3.0) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0)])
def test_invalid_rates_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ConfigError, match="must be above 0"):
        arrival_times(np.random.default_rng(0), 1, rate, burstiness=burstiness)


@pytest.mark.parametrize(("start", "end"), [(0.0, 1.0), (1.0, math.inf)])
def test_a_ramp_needs_valid_rates(start: float, end: float) -> None:
    with pytest.raises(ConfigError, match="finite and above 0"):
        RampUp("linear", start, end)
