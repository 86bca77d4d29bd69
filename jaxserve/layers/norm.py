"""Root mean square normalization (Zhang, Sennrich 2019)."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.layers.linear import TENSOR_AXIS
from pallas_kernels import normalization
from pallas_kernels.cpu import kernel_or_fallback


def rms_norm(x: Float[Array, "... dim"], weight: Float[Array, "... dim"], eps: float) -> Float[Array, "... dim"]:
    """Scale the last dimension to unit mean square, in float32, then by `weight` (it may broadcast) in `x`'s dtype."""
    if not normalization.supports_rms_norm(x, weight):
        return _rms_norm(x, weight, eps)
    kernel, otherwise = (functools.partial(norm, eps=eps) for norm in (normalization.rms_norm, _rms_norm))
    return kernel_or_fallback(kernel, otherwise, x, weight)


def rms_norm_of_shards(
    x: Float[Array, "tokens shard"], weight: Float[Array, " shard"], eps: float
) -> Float[Array, "tokens shard"]:
    """Normalize rows of which each shard of the tensor axis holds an equal part."""
    shards = lax.axis_size(TENSOR_AXIS)
    if shards == 1:
        return rms_norm(x, weight, eps)
    wide = x.astype(jnp.float32)
    total = lax.psum((wide * wide).sum(axis=-1, keepdims=True), TENSOR_AXIS)
    inverse = lax.rsqrt(total / (x.shape[-1] * shards) + eps)
    return ((wide * inverse).astype(weight.dtype) * weight).astype(x.dtype)


def layer_norm(
    x: Float[Array, "... dim"], weight: Float[Array, " dim"], bias: Float[Array, " dim"] | None, eps: float
) -> Float[Array, "... dim"]:
    """Scale the last dimension to zero mean and unit variance, then by `weight`, and add `bias`, all in float32."""
    wide = x.astype(jnp.float32)
    centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
    out = centered * lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + eps) * weight
    return (out if bias is None else out + bias).astype(x.dtype)


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return ((wide * inverse).astype(weight.dtype) * weight).astype(x.dtype)
