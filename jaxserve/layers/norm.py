"""Root mean square normalization (Zhang, Sennrich 2019) and layer normalization (Ba, Kiros, Hinton 2016)."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.layers.axes import TENSOR_AXES
from pallas_kernels import normalization
from pallas_kernels.cpu import kernel_or_fallback


def rms_norm(x: Float[Array, "... dim"], weight: Float[Array, "... dim"], eps: float) -> Float[Array, "... dim"]:
    """Scale the last dimension to unit mean square, in float32, then by `weight` (it may broadcast) in `x`'s dtype.

    A float32 `weight` is multiplied in float32, before the only rounding to `x`'s dtype.
    """
    if not normalization.supports_norm(x, weight):
        return _rms_norm(x, weight, eps)
    kernel, otherwise = (functools.partial(norm, eps=eps) for norm in (normalization.rms_norm, _rms_norm))
    return kernel_or_fallback(kernel, otherwise, x, weight)


def rms_norm_of_shards(
    x: Float[Array, "tokens shard"], weight: Float[Array, " shard"], eps: float
) -> Float[Array, "tokens shard"]:
    """Normalize rows of which each shard holds an equal part."""
    shards = lax.axis_size(TENSOR_AXES)
    if shards == 1:
        return rms_norm(x, weight, eps)
    wide = x.astype(jnp.float32)
    total = lax.psum((wide * wide).sum(axis=-1, keepdims=True), TENSOR_AXES)
    return _scaled(wide * lax.rsqrt(total / (x.shape[-1] * shards) + eps), weight, x.dtype)


def layer_norm(
    x: Float[Array, "... dim"], weight: Float[Array, "... dim"], bias: Float[Array, "... dim"] | None, eps: float
) -> Float[Array, "... dim"]:
    """Shift and scale the last dimension to mean 0 and variance 1, multiply by `weight` and add `bias`.

    All of it is in float32; the result is rounded to `x`'s dtype. `weight` and `bias` have one dtype and may broadcast.
    """
    factors = (weight,) if bias is None else (weight, bias)
    if not normalization.supports_norm(x, weight):
        return _layer_norm(x, *factors, eps=eps)
    kernel, otherwise = (functools.partial(norm, eps=eps) for norm in (normalization.layer_norm, _layer_norm))
    return kernel_or_fallback(kernel, otherwise, x, *factors)


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    return _scaled(wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps), weight, x.dtype)


def _scaled(normed: Array, weight: Array, dtype: jnp.dtype) -> Array:
    if weight.dtype != jnp.float32:
        normed = normed.astype(dtype)
    return (normed * weight).astype(dtype)


def _layer_norm(x: Array, weight: Array, bias: Array | None = None, *, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse = lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + eps)
    normed = centered * inverse * weight.astype(jnp.float32)
    return (normed if bias is None else normed + bias.astype(jnp.float32)).astype(x.dtype)
