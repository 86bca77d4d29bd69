"""The list of tiles that have rows of an expert, computed on the device: only it knows how many rows each has."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.grouped_matmul.groups import Groups


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertWork:
    """Pairs of an expert and a tile of rows, in the order of rows.

    The first `count` entries, int32 `[1]`, are pairs; the others repeat the last pair, so that nothing is copied for
    them. `starts` are those of `Groups`.
    """

    experts: Int32[Array, " work"]
    tiles: Int32[Array, " work"]
    count: Int32[Array, "1"]
    starts: Int32[Array, " experts_plus_1"]


def work_list(groups: Groups, block_rows: int) -> ExpertWork:
    """Return the pairs of experts and tiles of `block_rows` rows of which the expert has some."""
    first, stop = groups.starts[:-1], groups.starts[1:]
    first_tile = first // block_rows
    tiles = jnp.where(stop > first, (stop - 1) // block_rows - first_tile + 1, 0)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    # Each tile has a first expert, and each further expert begins in one tile
    most = -(-groups.num_rows // block_rows) + min(groups.num_experts, groups.num_rows) - 1
    work = jnp.minimum(jnp.arange(most, dtype=jnp.int32), jnp.maximum(ends[-1] - 1, 0))
    passed = (work[:, None] >= ends[None]).sum(axis=1, dtype=jnp.int32)
    experts = jnp.minimum(passed, groups.num_experts - 1)
    tile = first_tile[experts] + work - (ends - tiles)[experts]
    is_pair = ends[-1] > 0
    return ExpertWork(jnp.where(is_pair, experts, 0), jnp.where(is_pair, tile, 0), ends[-1:], groups.starts)
