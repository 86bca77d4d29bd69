"""Root mean square normalization (Zhang, Sennrich 2019)."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import normalization
from pallas_kernels.cpu import kernel_or_fallback
from pallas_kernels.paged_attention import Backend


def rms_norm(x: Float[Array, "... dim"], weight: Float[Array, "... dim"], eps: float) -> Float[Array, "... dim"]:
    """Scale the last dimension to unit mean square, in float32, then by `weight` (it may broadcast) in `x`'s dtype."""
    if not normalization.supports_rms_norm(x, weight):
        return _rms_norm(x, weight, eps)
    kernel, otherwise = (functools.partial(norm, eps=eps) for norm in (normalization.rms_norm, _rms_norm))
    return kernel_or_fallback(kernel, otherwise, x, weight)


def add_rms_norm(
    x: Float[Array, "tokens dim"],
    delta: Float[Array, "*terms tokens dim"],
    weight: Float[Array, " dim"],
    eps: float,
    backend: Backend,
) -> tuple[Float[Array, "tokens dim"], Float[Array, "tokens dim"]]:
    """Return `x + delta` and its `rms_norm`; on a GPU in one kernel, which also adds `delta`'s terms."""
    if backend.gpu_cores is not None:
        from pallas_kernels.normalization.triton import add_rms_norm as kernel  # elsewhere Triton isn't loaded

        return kernel(x, delta, weight, eps, interpret=backend.interpret)
    total = x + delta
    return total, rms_norm(total, weight, eps)


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * inverse).astype(x.dtype) * weight
