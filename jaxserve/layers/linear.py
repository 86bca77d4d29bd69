"""Matrix products, weights stored `[out, in]`, split over the tensor axis by column or row (Shoeybi et al. 2019)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

TENSOR_AXIS = "tensor"


def linear(
    x: Float[Array, "tokens in_dim"],
    weight: Float[Array, "out_dim in_dim"],
    bias: Float[Array, " out_dim"] | None = None,
    *,
    out_dtype: Any = None,
) -> Float[Array, "tokens out_dim"]:
    """`x @ weight.T + bias`. Column-parallel: each shard gives its own part of the output, nothing is exchanged."""
    out = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype or x.dtype)
    return out if bias is None else out + bias.astype(out.dtype)


def row_parallel(
    x: Float[Array, "tokens in_shard"],
    weight: Float[Array, "out_dim in_shard"],
    bias: Float[Array, " out_dim"] | None = None,
) -> Float[Array, "tokens out_dim"]:
    """The product of an input that is split over the tensor axis: partial sums are added over the shards."""
    out = lax.psum(linear(x, weight), TENSOR_AXIS)
    return out if bias is None else out + bias.astype(out.dtype)


def tensor_rank() -> Array:
    """This shard's index on the tensor axis."""
    return lax.axis_index(TENSOR_AXIS).astype(jnp.int32)
