"""The shapes and dtypes of an attention call: facts known before anything is compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

# The fp8 types of KV caches, with the largest number of each.
_LARGEST = {np.dtype(jnp.float8_e4m3fn): 448.0, np.dtype(jnp.float8_e5m2): 57344.0}


@dataclasses.dataclass(frozen=True)
class Problem:
    """The shapes and dtypes of a model's attention on one shard.

    With latent rows, a row has `head_dim` numbers, of which the first `value_dim` are the value.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: np.dtype
    kv_dtype: np.dtype
    value_dim: int | None = None


def is_float8(dtype: Any) -> bool:
    """Return whether a dtype is an fp8 type of KV caches: float8_e4m3fn or float8_e5m2."""
    return np.dtype(dtype) in _LARGEST


def largest_float8(dtype: Any) -> float:
    """Return the largest number of an fp8 type, to which larger ones are clipped."""
    return _LARGEST[np.dtype(dtype)]
