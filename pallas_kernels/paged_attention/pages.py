"""Reads and writes whole pages of a pool of any layout: the only access to a pool besides attention itself.

It serves copies to other memory, where a page is one contiguous run over all layers. Bits are never converted.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pallas_kernels.paged_attention.layout import PagedKV

PageContents = Shaped[Array, "count layers kv_heads page_size lanes"]


def read_pages(kv: PagedKV, pages: Int[Array, " count"]) -> tuple[PageContents, ...]:
    """Return these pages of all layers, one array for each array of the pool; for ids below 0, arbitrary contents."""
    entries = _entries(kv, pages)
    if kv.page_major:
        return tuple(pool.at[entries].get(mode="clip") for pool in kv.pools)
    return tuple(jnp.moveaxis(pool.at[:, entries].get(mode="clip"), 0, 2) for pool in kv.pools)


def write_pages(kv: PagedKV, pages: Int[Array, " count"], rows: Sequence[PageContents]) -> PagedKV:
    """Return the pool with the result of a `read_pages` written to these pages; ids below 0 are skipped."""
    entries = _entries(kv, pages)
    if kv.page_major:
        return kv.with_pools([pool.at[entries].set(new, mode="drop") for pool, new in zip(kv.pools, rows)])
    return kv.with_pools(
        [pool.at[:, entries].set(jnp.moveaxis(new, 2, 0), mode="drop") for pool, new in zip(kv.pools, rows)]
    )


def _entries(kv: PagedKV, pages: Int[Array, " count"]) -> Int[Array, "count layers"]:
    """Return the pool entries of each page, one a layer; an entry past the pool for ids below 0."""
    of_layers = jnp.arange(kv.num_layers, dtype=jnp.int32) * kv.num_pages
    return jnp.where(pages[:, None] < 0, kv.num_entries, pages[:, None] + of_layers)
