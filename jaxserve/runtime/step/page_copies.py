"""The two programs of the hierarchical cache, for each KV group: one reads some pages, one writes them back.

As every program, both take the state and return it. A page is copied as one row over all layers and heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxserve.layers.axes import DATA_AXIS
from jaxserve.layers.batch import replace_pool
from jaxserve.runtime.devices.mesh import partitions
from jaxserve.runtime.step.state import ArraySpec, DeviceState, all_ranks, one_rank
from pallas_kernels.paged_attention import read_pages, write_pages

PAGES_PER_COPY = 8
"""Pages that one call copies. A larger number would waste more reads when a single page is wanted."""

PageRows = tuple[jax.Array, ...]


def row_specs(state_specs: DeviceState, group: int) -> tuple[ArraySpec, ...]:
    """Return the rows of a call for each array of a group's pool.

    Each is `[ranks, pages, layers, kv_heads, page_size, lanes]`; the first group also has what a head that drafts needs
    of hidden states, `[ranks, pages, page_size, dim]`.
    """
    kv = state_specs.kv[group]
    heads, ranks = 2 if kv.page_major else 1, state_specs.last_tokens.shape[0]
    rows = [
        ArraySpec(
            (ranks, PAGES_PER_COPY, kv.num_layers, pool.shape[heads], *pool.shape[3:]),
            pool.dtype,
            ("ranks", None, None, pool.axes[heads], None, None),  # type: ignore[attr-defined]
        )
        for pool in kv.pools
    ]
    if group == 0 and (features := _features(state_specs)) is not None:
        shape = features.shape
        rows.append(dataclasses.replace(features, shape=(shape[0], PAGES_PER_COPY, *shape[2:])))
    return tuple(rows)


def _features(state: DeviceState) -> Any:
    """Return what is kept of hidden states on the pages of the first group, if anything is."""
    return None if state.drafts is None else state.drafts.features


def make_read_pages(
    mesh: Mesh, specs: DeviceState, group: int
) -> Callable[[DeviceState, jax.Array], tuple[DeviceState, PageRows]]:
    """Return the function `(state, pages) -> (state, rows)` over global arrays; rows of pages below 0 are undefined."""

    def body(state: DeviceState, pages: jax.Array) -> tuple[DeviceState, PageRows]:
        rows = read_pages(one_rank(state.kv[group]), one_rank(pages))
        if group == 0 and (features := _features(state)) is not None:
            rows = (*rows, one_rank(features).at[one_rank(pages)].get(mode="clip"))
        return state, all_ranks(rows)

    parts = partitions(specs)
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(parts, PartitionSpec(DATA_AXIS)),
        out_specs=(parts, partitions(row_specs(specs, group))),
        check_vma=False,
    )


def make_write_pages(
    mesh: Mesh, specs: DeviceState, group: int
) -> Callable[[DeviceState, jax.Array, PageRows], DeviceState]:
    """Return the function `(state, pages, rows) -> state` over global arrays; it skips pages below 0."""

    def body(state: DeviceState, pages: jax.Array, rows: PageRows) -> DeviceState:
        own, of_pools = one_rank(pages), one_rank(rows)
        if group == 0 and (features := _features(state)) is not None:
            *of_pools, copied = of_pools
            at = jnp.where(own < 0, features.shape[1], own)
            features = all_ranks(one_rank(features).at[at].set(copied, mode="drop"))
            assert state.drafts is not None
            state = dataclasses.replace(state, drafts=dataclasses.replace(state.drafts, features=features))
        pool = write_pages(one_rank(state.kv[group]), own, tuple(of_pools))
        return state.replace(kv=replace_pool(state.kv, group, all_ranks(pool)))  # type: ignore[attr-defined]

    parts = partitions(specs)
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(parts, PartitionSpec(DATA_AXIS), partitions(row_specs(specs, group))),
        out_specs=parts,
        check_vma=False,
    )
