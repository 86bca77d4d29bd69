"""Root mean square normalization (Zhang, Sennrich 2019)."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import normalization
from pallas_kernels.cpu import kernel_or_fallback


def rms_norm(x: Float[Array, "... dim"], weight: Float[Array, "... dim"], eps: float) -> Float[Array, "... dim"]:
    """Scale the last dimension to unit mean square, in float32, then by `weight` (it may broadcast) in `x`'s dtype."""
    if not normalization.supports_rms_norm(x, weight):
        return _rms_norm(x, weight, eps)
    kernel, otherwise = (functools.partial(norm, eps=eps) for norm in (normalization.rms_norm, _rms_norm))
    return kernel_or_fallback(kernel, otherwise, x, weight)


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * inverse).astype(x.dtype) * weight
