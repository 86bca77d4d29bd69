from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxserve.models.dtypes import dtype_of, kv_dtype_of


def test_dtypes() -> None:
    assert dtype_of("float32") == np.dtype(np.float32)
    assert dtype_of("auto") == dtype_of("bfloat16") == jnp.bfloat16
    assert kv_dtype_of("auto", dtype_of("float32")) == np.dtype(np.float32)
    assert kv_dtype_of("fp8", dtype_of("float32")) == jnp.float8_e4m3fn
    assert kv_dtype_of("fp8_e4m3", dtype_of("float32")) == jnp.float8_e4m3fn
    assert kv_dtype_of("fp8_e5m2", dtype_of("float32")) == jnp.float8_e5m2
