"""Writes new keys and values into their pages by an XLA scatter, for backends whose kernels don't."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.layout import PagedKV, as_pool_rows
from pallas_kernels.paged_attention.problem import is_float8, largest_float8


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
    """Return the pool with the new tokens in their pages; padding tokens get an index past the pool and are dropped."""
    slots = token_slots(k.shape[0], kv.page_size, page_table, query_starts, kv_lens, num_seqs)
    head = jnp.arange(k.shape[1], dtype=jnp.int32)[:, None]
    if kv.page_major:
        entry = layer * kv.num_pages + slots // kv.page_size
        at = (entry * kv.num_kv_heads + head) * kv.page_size + slots % kv.page_size
    else:
        at = (head * kv.num_entries + layer * kv.num_pages) * kv.page_size + slots
    at = jnp.where(slots >= 0, at, math.prod(kv.keys.shape[:3]))
    rows = as_pool_rows(as_pool_dtype(k, kv, layer, 0), as_pool_dtype(v, kv, layer, 1), kv)
    return kv.with_pools([_scatter(pool, at, new) for pool, new in zip(kv.pools, rows, strict=True)])


def token_slots(
    tokens: int,
    page_size: int,
    page_table: Int[Array, "rows max_pages"],
    query_starts: Int[Array, " rows_plus_1"],
    kv_lens: Int[Array, " rows"],
    num_seqs: Int[Array, ""],
) -> Int[Array, " tokens"]:
    """Return each token's index among the tokens of a layer's pages of one head; -1 for padding."""
    row, position = token_positions(tokens, query_starts, kv_lens)
    slots = page_table[row, position // page_size] * page_size + position % page_size
    return jnp.where(jnp.arange(tokens, dtype=jnp.int32) < query_starts[num_seqs], slots, -1)


def token_positions(
    tokens: int, query_starts: Int[Array, " rows_plus_1"], kv_lens: Int[Array, " rows"]
) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"]]:
    """Return each token's row and position; for padding, anything within the rows."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.searchsorted(query_starts[1:], token, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, kv_lens.shape[0] - 1)
    return row, kv_lens[row] - query_starts[row + 1] + token


def queries_as_rows(
    tokens: int,
    query_starts: Int[Array, " rows_plus_1"],
    kv_lens: Int[Array, " rows"],
    num_seqs: Int[Array, ""],
) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"], Int[Array, ""]]:
    """Return rows of the page table, lengths and the number of decodes if each query is a decode of its own."""
    row, position = token_positions(tokens, query_starts, kv_lens)
    live = query_starts[num_seqs]
    return row, jnp.where(jnp.arange(tokens, dtype=jnp.int32) < live, position + 1, 0), live


def as_pool_dtype(
    x: Float[Array, "tokens kv_heads head_dim"], kv: PagedKV, layer: int | Int[Array, ""], which: int
) -> Float[Array, "tokens kv_heads head_dim"]:
    """Convert to the pool's dtype; fp8 is divided by the layer's scales. `which` is 0 for keys, 1 for values."""
    if kv.scales is not None:
        x = x.astype(jnp.float32) / kv.scales[which, layer][:, None]
    if is_float8(kv.keys.dtype):
        largest = largest_float8(kv.keys.dtype)
        x = jnp.clip(x, -largest, largest)
    return x.astype(kv.keys.dtype)


def _scatter(pool: Array, at: Int[Array, "kv_heads tokens"], new: Float[Array, "tokens kv_heads lanes"]) -> Array:
    """Scatter one row a head and token: for windows over several heads, a TPU would copy the whole pool twice."""
    rows = pool.reshape(-1, pool.shape[3])
    return rows.at[at].set(new.swapaxes(0, 1), mode="drop").reshape(pool.shape)
