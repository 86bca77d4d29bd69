"""Puts new keys and values into their pages as an XLA scatter: for backends that don't do it in their kernels."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.layout import PagedKV, in_lanes
from pallas_kernels.paged_attention.problem import is_float8

FLOAT8_MAX = 448.0


def write_kv(
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    kv: PagedKV,
    layer: int | Int[Array, ""],
    page_table: Int[Array, "rows max_pages"],
    query_starts: Int[Array, " rows_plus_1"],
    kv_lens: Int[Array, " rows"],
    num_seqs: Int[Array, ""],
) -> PagedKV:
    """The pool with the new tokens in their pages; padding tokens get a place past the pool and are dropped."""
    slots = token_slots(k.shape[0], kv.page_size, page_table, query_starts, kv_lens, num_seqs)
    head = jnp.arange(k.shape[1], dtype=jnp.int32)[:, None]
    if kv.page_major:
        entry = layer * kv.num_pages + slots // kv.page_size
        at = (entry * kv.num_kv_heads + head) * kv.page_size + slots % kv.page_size
    else:
        at = (head * kv.num_entries + layer * kv.num_pages) * kv.page_size + slots
    at = jnp.where(slots >= 0, at, math.prod(kv.keys.shape[:3]))
    rows = in_lanes(stored(k, kv, layer, 0), stored(v, kv, layer, 1), kv)
    return kv.with_pools([_scatter(pool, at, new) for pool, new in zip(kv.pools, rows, strict=True)])


def token_slots(
    tokens: int,
    page_size: int,
    page_table: Int[Array, "rows max_pages"],
    query_starts: Int[Array, " rows_plus_1"],
    kv_lens: Int[Array, " rows"],
    num_seqs: Int[Array, ""],
) -> Int[Array, " tokens"]:
    """Where each token goes among the tokens of a layer's pages of one head; -1 for padding."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.searchsorted(query_starts[1:], token, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, page_table.shape[0] - 1)
    position = kv_lens[row] - query_starts[row + 1] + token
    slots = page_table[row, position // page_size] * page_size + position % page_size
    return jnp.where(token < query_starts[num_seqs], slots, -1)


def stored(
    x: Float[Array, "tokens kv_heads head_dim"], kv: PagedKV, layer: int | Int[Array, ""], which: int
) -> Float[Array, "tokens kv_heads head_dim"]:
    """As the pool holds it: of its dtype, fp8 divided by the layer's scales. `which` is 0 for keys, 1 for values."""
    if kv.scales is not None:
        x = x.astype(jnp.float32) / kv.scales[which, layer][:, None]
    if is_float8(kv.keys.dtype):
        x = jnp.clip(x, -FLOAT8_MAX, FLOAT8_MAX)
    return x.astype(kv.keys.dtype)


def _scatter(pool: Array, at: Int[Array, "kv_heads tokens"], new: Float[Array, "tokens kv_heads lanes"]) -> Array:
    """One row a head and token: for windows that span heads a TPU would lay out the whole pool anew, and back."""
    rows = pool.reshape(-1, pool.shape[3])
    return rows.at[at].set(new.swapaxes(0, 1), mode="drop").reshape(pool.shape)
