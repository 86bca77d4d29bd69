"""Whole pages out of a pool and back into one, whatever its layout: the only access besides attention itself.

For copies to elsewhere, so that a page is one contiguous run over all layers. Never converts: what comes out goes back
bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pallas_kernels.paged_attention.layout import PagedKV

Rows = Shaped[Array, "count layers kv_heads page_size lanes"]


def read_pages(kv: PagedKV, pages: Int[Array, " count"]) -> tuple[Rows, ...]:
    """Some pages of all layers, an array for each that the pool has. Of a page below 0 it gives anything."""
    entries = _entries(kv, pages)
    if kv.page_major:
        return tuple(pool.at[entries].get(mode="clip") for pool in kv.pools)
    return tuple(jnp.moveaxis(pool.at[:, entries].get(mode="clip"), 0, 2) for pool in kv.pools)


def write_pages(kv: PagedKV, pages: Int[Array, " count"], rows: Sequence[Rows]) -> PagedKV:
    """The pool with what `read_pages` gave in these pages; those below 0 are left out."""
    entries = _entries(kv, pages)
    if kv.page_major:
        return kv.with_pools([pool.at[entries].set(new, mode="drop") for pool, new in zip(kv.pools, rows)])
    return kv.with_pools(
        [pool.at[:, entries].set(jnp.moveaxis(new, 2, 0), mode="drop") for pool, new in zip(kv.pools, rows)]
    )


def _entries(kv: PagedKV, pages: Int[Array, " count"]) -> Int[Array, "count layers"]:
    """Where the layers of each page lie; beyond the pool for one below 0."""
    of_layers = jnp.arange(kv.num_layers, dtype=jnp.int32) * kv.num_pages
    return jnp.where(pages[:, None] < 0, kv.num_entries, pages[:, None] + of_layers)
