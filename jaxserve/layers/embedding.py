"""The token embedding and the output head, both split over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.layers.axes import sum_of_shards
from jaxserve.layers.linear import linear
from jaxserve.layers.vocabulary import change_rows, shard_index
from pallas_kernels.quantized_matmul import HeldWeight, PackedWeight, gather_rows


@jax.named_scope("embed")
def embed(
    tokens: Int[Array, " tokens"], table: Float[Array, "vocab_shard dim"] | PackedWeight
) -> Float[Array, "tokens dim"]:
    """Return the tokens' rows of the table: a shard gives zeros for tokens of other shards, and shards are summed."""
    local = shard_index(tokens, table.shape[0])
    if isinstance(table, PackedWeight):
        return sum_of_shards(gather_rows(table, local))
    return sum_of_shards(table.at[local].get(mode="fill", fill_value=0))


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
    return found if change is None else change_rows(change, found, num_rows)
