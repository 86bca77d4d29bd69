"""The contract of every backend, in XLA: dequantize, then `lax.ragged_dot`, in float32."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Shaped

from pallas_kernels.dispatch import Backend
from pallas_kernels.grouped_matmul.epilogue import Epilogue
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.quantized_matmul import QuantizedWeight, dequantize


def multiply(
    x: Shaped[Array, "tokens_or_rows in_dim"],
    factors: Float32[Array, "tokens_or_rows groups"] | None,
    weight: Float[Array, "experts out_dim in_dim"] | QuantizedWeight,
    groups: Groups,
    epilogue: Epilogue,
    *,
    of_tokens: bool,
    out_dtype: Any,
    backend: Backend,
) -> Float32[Array, "rows out_or_half"]:
    """See `backends.ExpertsModule`."""
    values = x.astype(jnp.float32)
    if factors is not None:
        values = (values.reshape(len(x), factors.shape[1], -1) * factors[..., None]).reshape(x.shape)
    if of_tokens:
        values = values[groups.tokens]
    dense = dequantize(weight) if isinstance(weight, QuantizedWeight) else weight.astype(jnp.float32)
    sizes = jnp.diff(groups.starts)
    out = lax.ragged_dot(values, dense.swapaxes(1, 2), sizes, precision=lax.Precision.HIGHEST)
    return epilogue.apply(out, groups)
