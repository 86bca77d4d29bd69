"""The contract of every backend, in XLA: dequantize, then multiply, in float32."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Shaped

from pallas_kernels.dispatch import Backend
from pallas_kernels.quantized_matmul.layout import QuantizedWeight, dequantize


def multiply(
    x: Shaped[Array, "tokens in_dim"],
    factors: Float32[Array, "tokens groups"] | None,
    weight: QuantizedWeight,
    *,
    out_dtype: Any,
    backend: Backend,
) -> Float32[Array, "tokens out_dim"]:
    """See `backends.ProductModule`."""
    values = x.astype(jnp.float32)
    if factors is not None:
        values = (values.reshape(len(x), factors.shape[1], -1) * factors[..., None]).reshape(x.shape)
    dense = dequantize(weight).reshape(-1, x.shape[1])
    return lax.dot_general(values, dense, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
