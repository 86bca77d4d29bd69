"""The shapes and dtypes of an attention call: facts known before anything is compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Problem:
    """The shapes and dtypes of a model's attention on one shard."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: np.dtype
    kv_dtype: np.dtype


def is_float8(dtype: Any) -> bool:
    """Return whether a dtype is float8_e4m3fn, the fp8 type of KV caches."""
    return bool(np.dtype(dtype) == jax.numpy.float8_e4m3fn)
