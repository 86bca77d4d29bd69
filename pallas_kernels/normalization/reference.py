"""The contract of the kernels, in XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32


def rms_norm(x: Float[Array, "... dim"], weight: Float[Array, "... dim"], eps: float) -> Float[Array, "... dim"]:
    """See `api.rms_norm`."""
    wide = x.astype(jnp.float32)
    return scaled(wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps), weight, x.dtype)


def scaled(
    normed: Float32[Array, "... dim"], weight: Float[Array, "... dim"], dtype: jnp.dtype
) -> Float[Array, "... dim"]:
    """Multiply a norm's result by its weight, in `dtype`; a float32 weight in float32, before the only rounding."""
    if weight.dtype != jnp.float32:
        normed = normed.astype(dtype)
    return (normed * weight).astype(dtype)


def layer_norm(
    x: Float[Array, "... dim"],
    weight: Float[Array, "... dim"],
    bias: Float[Array, "... dim"] | None = None,
    *,
    eps: float,
) -> Float[Array, "... dim"]:
    """See `api.layer_norm`."""
    wide = x.astype(jnp.float32)
    centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse = lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + eps)
    normed = centered * inverse * weight.astype(jnp.float32)
    return (normed if bias is None else normed + bias.astype(jnp.float32)).astype(x.dtype)


def log_sum_exp(x: Float[Array, "rows some"]) -> Float[Array, "rows 1"]:
    """See `api.log_sum_exp`."""
    return jax.nn.logsumexp(x, axis=1, keepdims=True)
