"""Norms of rows that are divided among shards; `pallas_kernels.normalization` has those of whole rows."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.layers.axes import TENSOR_AXES
from pallas_kernels.normalization import layer_norm, rms_norm, scaled

__all__ = ["layer_norm", "rms_norm", "rms_norm_of_shards"]


def rms_norm_of_shards(
    x: Float[Array, "tokens shard"], weight: Float[Array, " shard"], eps: float
) -> Float[Array, "tokens shard"]:
    """Normalize rows of which each shard holds an equal part."""
    shards = lax.axis_size(TENSOR_AXES)
    if shards == 1:
        return rms_norm(x, weight, eps)
    wide = x.astype(jnp.float32)
    total = lax.psum((wide * wide).sum(axis=-1, keepdims=True), TENSOR_AXES)
    return scaled(wide * lax.rsqrt(total / (x.shape[-1] * shards) + eps), weight, x.dtype)
