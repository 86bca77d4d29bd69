"""The numpy dtypes that the flags `--dtype` and `--kv-cache-dtype` name."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np


def dtype_of(name: str) -> np.dtype:
    """Return the dtype of a `--dtype`; `auto` is bfloat16."""
    return np.dtype(jnp.bfloat16 if name in ("auto", "bfloat16") else np.float32)


def kv_dtype_of(name: str, dtype: np.dtype) -> np.dtype:
    """Return the dtype of a `--kv-cache-dtype`; `auto` is `dtype`, the dtype of activations."""
    if name == "auto":
        return dtype
    return np.dtype(jnp.float8_e5m2 if name == "fp8_e5m2" else jnp.float8_e4m3fn)
