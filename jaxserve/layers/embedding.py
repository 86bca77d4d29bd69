"""The token embedding and the output head, both split over the vocabulary."""

from __future__ import annotations

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


def mask_padding(logits: Float[Array, "rows vocab_shard"], vocab_size: int) -> Float[Array, "rows vocab_shard"]:
    """Set the logits of ids that only pad the vocabulary to -inf, so that these are never drawn."""
    size = logits.shape[1]
    if size * lax.axis_size(TENSOR_AXES) == vocab_size:
        return logits
    ids = tensor_rank() * size + jnp.arange(size, dtype=jnp.int32)
    return jnp.where(ids < vocab_size, logits, -jnp.inf)


@jax.named_scope("head")
def logits(
    x: Float[Array, "rows dim"],
    table: Float[Array, "vocab_shard dim"] | HeldWeight,
    *,
    soft_cap: float | None = None,
) -> Float[Array, "rows vocab_shard"]:
    """Return this shard's part of the logits, in float32; a hyperbolic tangent keeps them within `soft_cap`."""
    found = linear(x, table, out_dtype=jnp.float32)
    return found if soft_cap is None else soft_cap * jnp.tanh(found / soft_cap)
