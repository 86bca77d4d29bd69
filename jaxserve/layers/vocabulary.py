"""Divides the vocabulary over the shards of a rank: shard i holds `shard_size` ids, from `i * shard_size` on.

Ids that the model doesn't have pad the last shards (`LaidOutModel.padded_vocab_size`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from jaxserve.layers.axes import TENSOR_AXES, sum_of_shards, tensor_rank


def num_shards() -> int:
    """Return the number of shards of the vocabulary."""
    return int(lax.axis_size(TENSOR_AXES))


def first_id(shard_size: int) -> Int[Array, ""]:
    """Return the id of this shard's first token."""
    return tensor_rank() * shard_size


def shard_index(tokens: Int[Array, "..."], shard_size: int) -> Int[Array, "..."]:
    """Return the rows of tokens in this shard of the vocabulary; `shard_size`, one past its end, for other tokens."""
    local = tokens - first_id(shard_size)
    return jnp.where((local >= 0) & (local < shard_size), local, shard_size)


def gather_shards(x: Shaped[Array, "rows some"]) -> Shaped[Array, "rows some_of_all"]:
    """Return the columns of all shards, in their order."""
    return lax.all_gather(x, TENSOR_AXES, axis=1, tiled=True)


def token_logit(logits: Float[Array, "rows vocab_shard"], token: Int[Array, " rows"]) -> Float[Array, "rows 1"]:
    """Return each row's logit of its token, from the shard that has it."""
    size = logits.shape[1]
    at = shard_index(token, size)[:, None]
    own = jnp.take_along_axis(logits, jnp.minimum(at, size - 1), axis=1)
    return sum_of_shards(jnp.where(at < size, own, 0.0))


def mask_padding(
    logits: Float[Array, "rows vocab_shard"], vocab_size: int, num_rows: Int[Array, ""] | None = None
) -> Float[Array, "rows vocab_shard"]:
    """Set the logits of ids that only pad the vocabulary to -inf, so that these are never drawn.

    Only the first `num_rows` are needed, if it is given.
    """
    size = logits.shape[1]
    if size * num_shards() == vocab_size:
        return logits
    ids = first_id(size) + jnp.arange(size, dtype=jnp.int32)
    return change_rows(lambda x: jnp.where(ids < vocab_size, x, -jnp.inf), logits, num_rows)


def change_rows(
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
