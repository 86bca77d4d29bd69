"""Refuses scales of a checkpoint that float32, in which they are multiplied, can't use.

A scale near 0 may become 0; a large one makes products infinite, or all inputs 0. A file with such a scale is damaged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.errors import ConfigError

Array = np.ndarray[Any, Any]

LARGEST_SCALE = 1e6
"""No model has scales near this: a scale is the largest number of a group divided by that of its type, 7 to 448."""
SMALLEST_INPUT_SCALE = 1e-15
"""The smallest scale of inputs, keys and values. Quantizers write 2e-15 for inputs that were all 0."""
_SMALLEST_WEIGHT_SCALE = np.finfo(np.float32).tiny
_ADVICE = "the file is damaged; fetch it again"
INPUT_SCALES = f"from {SMALLEST_INPUT_SCALE:g} to {LARGEST_SCALE:g}"


def are_input_scales(values: Array) -> bool:
    """Return whether inputs, keys or values can be divided by all of these numbers."""
    return bool(((values >= SMALLEST_INPUT_SCALE) & (values <= LARGEST_SCALE)).all())


def check_input_scales(values: Array, name: str, where: str) -> None:
    """Raise `ConfigError` naming the tensor unless `are_input_scales`."""
    if not are_input_scales(values):
        shown = ", ".join(f"{value:g}" for value in values.flat)
        raise ConfigError(f"{where}: {name} must be {INPUT_SCALES}, got {shown}; {_ADVICE}")


def check_weight_scales(scales: Array, name: str, where: str, used: Callable[[Array], Array] | None = None) -> None:
    """Raise `ConfigError` naming the tensor and the value if weights can't be multiplied by a scale.

    A scale may be 0 or subnormal if all its numbers are 0. `used(chosen)` takes a mask of scales, and returns a mask of
    the chosen ones whose numbers aren't all 0. Without it, any scale may be 0 or subnormal.
    """
    magnitude = np.abs(scales)
    wrong = ~(magnitude <= LARGEST_SCALE)
    low = magnitude < _SMALLEST_WEIGHT_SCALE
    if used is not None and low.any():
        wrong[low] = used(low)
    if wrong.any():
        raise ConfigError(
            f"{where}: {name} holds the scale {scales[wrong][0]:g}; the magnitude of scales must be from "
            f"{_SMALLEST_WEIGHT_SCALE:.3g} to {LARGEST_SCALE:g}, or 0 where all numbers are 0: {_ADVICE}"
        )
