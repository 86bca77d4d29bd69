"""Writes new keys and values into their pages by an XLA scatter, for backends whose kernels don't."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.arguments import Rows
from pallas_kernels.paged_attention.layout import PagedKV, as_pool_rows
from pallas_kernels.paged_attention.problem import is_float8, largest_float8


def write_kv(
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"] | None,
    kv: PagedKV,
    layer: int | Int[Array, ""],
    rows: Rows,
) -> PagedKV:
    """Return the pool with the new tokens in their pages; padding tokens get an index past the pool and are dropped."""
    slots = rows.slots(k.shape[0], kv.page_size)
    head = jnp.arange(k.shape[1], dtype=jnp.int32)[:, None]
    if kv.page_major:
        entry = layer * kv.num_pages + slots // kv.page_size
        at = (entry * kv.num_kv_heads + head) * kv.page_size + slots % kv.page_size
    else:
        at = (head * kv.num_entries + layer * kv.num_pages) * kv.page_size + slots
    at = jnp.where(slots >= 0, at, math.prod(kv.keys.shape[:3]))
    new = as_pool_rows(as_pool_dtype(k, kv, layer, 0), None if v is None else as_pool_dtype(v, kv, layer, 1), kv)
    return kv.with_pools([_scatter(pool, at, one) for pool, one in zip(kv.pools, new, strict=True)])


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
