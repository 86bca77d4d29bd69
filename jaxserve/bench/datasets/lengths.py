"""Lengths of random prompts and answers. vLLM's and SGLang's tools give one ratio two meanings; each has a name
here."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np

from jaxserve.errors import ConfigError

Semantics = Literal["vllm", "sglang"]
SEMANTICS: dict[Semantics, str] = {
    "vllm": "from L*(1-R) to L*(1+R), so 0 is always L",
    "sglang": "from L*R to L, so 1 is always L and 0 is anything from 1 to L",
}


@dataclasses.dataclass(frozen=True, slots=True)
class LengthRange:
    """Whole numbers from `low` to `high` inclusive, all equally likely."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator) -> int:
        """Draw one of them."""
        return int(rng.integers(self.low, self.high + 1))

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"


def length_range(length: int, ratio: float, semantics: Semantics) -> LengthRange:
    """Return the range that a tool with these semantics draws from. Raises `ConfigError`."""
    if length < 1:
        raise ConfigError(f"a length must be at least 1 token, got {length}")
    if semantics == "vllm":
        if not 0 <= ratio < 1:
            raise ConfigError(f"--random-range-ratio must be in [0, 1) by vLLM's semantics, got {ratio:g}")
        return LengthRange(max(math.floor(length * (1 - ratio)), 1), math.ceil(length * (1 + ratio)))
    if not 0 <= ratio <= 1:
        raise ConfigError(f"--random-range-ratio must be in [0, 1] by SGLang's semantics, got {ratio:g}")
    return LengthRange(max(int(length * ratio), 1), length)
