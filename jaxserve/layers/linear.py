"""Matrix products, weights stored `[out, in]`, split over shards by column or row (Shoeybi et al. 2019)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.layers.axes import sum_of_shards
from pallas_kernels.grouped_matmul import Groups, grouped_matmul
from pallas_kernels.quantized_matmul import HeldWeight, quantized_matmul
from pallas_kernels.target import CPU

_LANES = 64
_MAX_TERMS = 64
_ROWS_OF_A_TPU = 8


def linear(
    x: Float[Array, "tokens in_dim"],
    weight: Float[Array, "out_dim in_dim"] | HeldWeight,
    bias: Float[Array, " out_dim"] | None = None,
    *,
    out_dtype: Any = None,
    one_pass: bool = False,
    num_rows: Int[Array, ""] | None = None,
) -> Float[Array, "tokens out_dim"]:
    """Return `x @ weight.T + bias`. Column-parallel: each shard computes its own part of the output.

    `one_pass` says that no norm precedes, and only the first `num_rows` are needed (see `quantized_matmul`).
    """
    dtype = jnp.dtype(out_dtype or x.dtype)
    if isinstance(weight, HeldWeight):
        out = quantized_matmul(x, weight, out_dtype=dtype, one_pass=one_pass, num_rows=num_rows)
    else:
        out = _product(x, weight, dtype)
    return out if bias is None else out + bias.astype(out.dtype)


def _product(x: Array, weight: Array, out_dtype: jnp.dtype) -> Array:
    def product(x: Array, weight: Array) -> Array:
        return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)

    if x.shape[0] > 1 or x.dtype != jnp.bfloat16:
        return product(x, weight)
    return lax.platform_dependent(
        x,
        weight,
        cpu=lambda x, weight: _one_row_on_cpu(x, weight).astype(out_dtype),
        # With one row, XLA multiplies and adds outside of the matrix units.
        tpu=lambda x, weight: product(jnp.pad(x, ((0, _ROWS_OF_A_TPU - 1), (0, 0))), weight)[:1],
        default=product,
    )


def _one_row_on_cpu(x: Float[Array, "1 in_dim"], weight: Float[Array, "out_dim in_dim"]) -> Float[Array, "1 out_dim"]:
    """Multiply one bfloat16 row, accumulating in float32, at the speed of memory; XLA's own product is 20 times slower.

    Each output has `lanes` partial sums side by side, written out term by term, so that the compiler vectorizes over
    the lanes and reads each weight once, in order. The barrier keeps it from doing the last sum in the same loop.
    """
    out_dim, in_dim = weight.shape
    lanes = _lanes(in_dim)
    if lanes is None:  # XLA's product of two rows runs at the speed of memory
        twice = jnp.tile(x, (2, 1))
        return lax.dot_general(twice, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)[:1]
    row = x.astype(jnp.float32)[0]
    sums = jnp.zeros((out_dim, lanes), jnp.float32)
    for at in range(0, in_dim, lanes):
        sums += weight[:, at : at + lanes].astype(jnp.float32) * row[at : at + lanes]
    return lax.optimization_barrier(sums).sum(axis=1)[None]


def _lanes(in_dim: int) -> int | None:
    """Return the number of partial sums, a divisor of `in_dim`; None if every one gives too many terms to compile."""
    for lanes in range(_LANES, in_dim + 1, _LANES):
        if in_dim % lanes == 0 and in_dim // lanes <= _MAX_TERMS:
            return lanes
    return None


def linear_by_head(
    x: Float[Array, "tokens heads in_dim"], weight: Float[Array, "heads out_dim in_dim"] | HeldWeight
) -> Float[Array, "tokens heads out_dim"]:
    """Multiply the vector of each head by the head's own weight."""
    if not isinstance(weight, HeldWeight):
        return jnp.einsum("thi,hoi->tho", x, weight, preferred_element_type=x.dtype)
    tokens, heads, _ = x.shape
    # A CPU packs weights, and multiplies by the weights of heads as by those of experts
    rows, none = tokens * heads, jnp.zeros((0, 0), jnp.int32)
    groups = Groups(jnp.arange(0, rows + 1, tokens, dtype=jnp.int32), jnp.zeros(rows, jnp.int32), none)
    by_head = x.swapaxes(0, 1).reshape(rows, -1)
    out = grouped_matmul(by_head, weight, groups, out_dtype=x.dtype, target=CPU, one_pass=True)
    return out.reshape(heads, tokens, -1).swapaxes(0, 1)


def row_parallel(
    x: Float[Array, "tokens in_shard"],
    weight: Float[Array, "out_dim in_shard"] | HeldWeight,
    bias: Float[Array, " out_dim"] | None = None,
) -> Float[Array, "tokens out_dim"]:
    """Return the product of an input that is split over shards, by adding the partial sums of all shards."""
    out = sum_of_shards(linear(x, weight, one_pass=True))
    return out if bias is None else out + bias.astype(out.dtype)
