from __future__ import annotations

import numpy as np
import pytest

from jaxserve.bench.datasets.lengths import LengthRange, Semantics, length_range
from jaxserve.errors import ConfigError


@pytest.mark.parametrize(
    ("length", "ratio", "semantics", "low", "high"),
    [
        (100, 0.0, "vllm", 100, 100),
        (100, 0.25, "vllm", 75, 125),
        (101, 0.5, "vllm", 50, 152),
        (1, 0.9, "vllm", 1, 2),
        (100, 0.0, "sglang", 1, 100),
        (100, 0.25, "sglang", 25, 100),
        (100, 1.0, "sglang", 100, 100),
    ],
)
def test_a_ratio_has_two_meanings(length: int, ratio: float, semantics: Semantics, low: int, high: int) -> None:
    assert length_range(length, ratio, semantics) == LengthRange(low, high)


def test_every_length_of_a_range_is_drawn() -> None:
    rng = np.random.default_rng(0)
    assert {LengthRange(3, 6).draw(rng) for _ in range(200)} == {3, 4, 5, 6}


@pytest.mark.parametrize(
    ("length", "ratio", "semantics"), [(0, 0.0, "vllm"), (9, 1.0, "vllm"), (9, -0.1, "vllm"), (9, 1.1, "sglang")]
)
def test_invalid_lengths_and_ratios_are_refused(length: int, ratio: float, semantics: Semantics) -> None:
    with pytest.raises(ConfigError):
        length_range(length, ratio, semantics)
