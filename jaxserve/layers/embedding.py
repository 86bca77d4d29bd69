"""Token embedding and output head, both split over the vocabulary."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import TENSOR_AXIS, linear, tensor_rank


def embed(tokens: Int[Array, " tokens"], table: Float[Array, "vocab_shard dim"]) -> Float[Array, "tokens dim"]:
    """Rows of the table; a shard gives zeros for tokens of other shards, and the sum over shards is the row."""
    local = tokens - tensor_rank() * table.shape[0]
    here = (local >= 0) & (local < table.shape[0])
    rows = table.at[jnp.where(here, local, 0)].get(mode="promise_in_bounds")
    return lax.psum(jnp.where(here[:, None], rows, jnp.zeros((), rows.dtype)), TENSOR_AXIS)


def logits(x: Float[Array, "rows dim"], table: Float[Array, "vocab_shard dim"]) -> Float[Array, "rows vocab_shard"]:
    """This shard's part of the logits, in float32."""
    return linear(x, table, out_dtype=jnp.float32)
