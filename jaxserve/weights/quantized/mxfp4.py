"""Decodes MXFP4 (OCP Microscaling Formats 1.0) as gpt-oss stores it: 32 inputs of an output share a power of two."""

from __future__ import annotations

from typing import Any

import numpy as np

_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Those of a 4-bit float: a sign, two bits of exponent, one of mantissa."""
_BIAS = 127


def decode_mxfp4(
    blocks: np.ndarray[Any, np.dtype[np.uint8]], scales: np.ndarray[Any, np.dtype[np.uint8]]
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return weights `[..., out, in]` of `blocks`, uint8 `[..., out, in / 32, 16]`, and `scales` `[..., out, in / 32]`.

    The low four bits of a byte come first. A scale is the biased exponent of a power of two; 255 is NaN.
    """
    numbers = np.stack([_VALUES[blocks & 15], _VALUES[blocks >> 4]], axis=-1).reshape(*blocks.shape[:-1], 32)
    exponents = np.minimum(scales, 254).astype(np.int32) - _BIAS
    factors = np.where(scales == 255, np.float32(np.nan), np.ldexp(np.float32(1), exponents))
    return (numbers * factors[..., None]).reshape(*blocks.shape[:-2], -1)
