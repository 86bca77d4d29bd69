"""The token embedding and the output head, both split over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.layers.axes import TENSOR_AXES, sum_of_shards, tensor_rank
from jaxserve.layers.linear import linear
from pallas_kernels.quantized_matmul import HeldWeight, PackedWeight, gather_rows


def shard_index(tokens: Int[Array, "..."], shard_size: int) -> Int[Array, "..."]:
    """Return the rows of tokens in this shard of the vocabulary; `shard_size`, one past its end, for other tokens."""
    local = tokens - tensor_rank() * shard_size
    return jnp.where((local >= 0) & (local < shard_size), local, shard_size)


@jax.named_scope("embed")
def embed(
    tokens: Int[Array, " tokens"], table: Float[Array, "vocab_shard dim"] | PackedWeight
) -> Float[Array, "tokens dim"]:
    """Return the tokens' rows of the table: a shard gives zeros for tokens of other shards, and shards are summed."""
    local = shard_index(tokens, table.shape[0])
    if isinstance(table, PackedWeight):
        return sum_of_shards(gather_rows(table, local))
    return sum_of_shards(table.at[local].get(mode="fill", fill_value=0))


def mask_padding(
    logits: Float[Array, "rows vocab_shard"], vocab_size: int, num_rows: Int[Array, ""] | None = None
) -> Float[Array, "rows vocab_shard"]:
    """Set the logits of ids that only pad the vocabulary to -inf, so that these are never drawn.

    Only the first `num_rows` are needed, if it is given.
    """
    size = logits.shape[1]
    if size * lax.axis_size(TENSOR_AXES) == vocab_size:
        return logits
    ids = tensor_rank() * size + jnp.arange(size, dtype=jnp.int32)
    return _change_rows(lambda x: jnp.where(ids < vocab_size, x, -jnp.inf), logits, num_rows)


@jax.named_scope("head")
def logits(
    x: Float[Array, "rows dim"],
    table: Float[Array, "vocab_shard dim"] | HeldWeight,
    num_rows: Int[Array, ""] | None = None,
    *,
    change: Callable[[Array], Array] | None = None,
) -> Float[Array, "rows vocab_shard"]:
    """Return this shard's part of the logits, in float32, with `change` applied to each number.

    Only the first `num_rows` rows are needed, at least one: the others may hold anything.
    """
    found = linear(x, table, out_dtype=jnp.float32, num_rows=num_rows)
    return found if change is None else _change_rows(change, found, num_rows)


def _change_rows(
    change: Callable[[Array], Array], logits: Float[Array, "rows vocab_shard"], num_rows: Int[Array, ""] | None
) -> Float[Array, "rows vocab_shard"]:
    """Change all logits, or those of the first `num_rows` rows, one after another in place."""
    if num_rows is None or len(logits) == 1:
        return change(logits)

    def body(row: Array, rows: Array) -> Array:
        # Without the barrier, XLA changes and stores numbers in one operation, for which it takes one thread.
        changed = lax.optimization_barrier(change(lax.dynamic_slice_in_dim(rows, row, 1)))
        return lax.dynamic_update_slice_in_dim(rows, changed, row, axis=0)

    return lax.fori_loop(0, num_rows, body, logits)
