"""The loading warpgroup's part if the pool holds fp8: it converts each block to bfloat16 for the tensor cores.

Stored blocks are copied into a ring of their own, some of them in flight. Blocks of keys and of values are converted in
turn into the shared memory that the products read, one or two blocks ahead of the other warpgroups, while these compute
a softmax or a product. The other warpgroups apply the scales, so the conversion is exact.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic_gpu.parts import (
    TILE_ROWS,
    MosaicGpuAttention,
    Ring,
    drain_rings,
    load_block,
    set_register_budget,
)

# A thread reads eight contiguous numbers and writes them with one instruction, and a warp fills whole lines: neither
# access has bank conflicts, whatever the head size.
_NUMBERS, _LANES, _WARPS, _LINE = 8, 32, 4, 128


def convert_rings(
    attention: MosaicGpuAttention,
    rings: Sequence[tuple[Any, Ring]],
    head: jax.Array,
    entry: Callable[[jax.Array], jax.Array],
    low: jax.Array,
    high: jax.Array,
    seen: tuple[jax.Array, jax.Array],
) -> None:
    """Fill the rings as `fill_rings` does, converting stored blocks; the first ring is of keys, the second of values.

    `seen` has the first position that is seen, and the end. Rows of values outside may hold NaN and become zeros.
    """
    set_register_budget(attention, attends=False)
    stages, block = jnp.int32(attention.stages), attention.block

    def load(i: jax.Array, pool: Any, ring: Ring) -> None:
        slot = lax.rem(i - low, stages)
        load_block(attention, pool, head, entry, i, ring.stored.at[slot], ring.copied.at[slot])

    def start(i: jax.Array, carry: tuple[()]) -> tuple[()]:
        for pool, ring in rings:
            load(i, pool, ring)
        return carry

    def step(i: jax.Array, carry: tuple[()]) -> tuple[()]:
        source, slot, first = lax.rem(i - low, stages), attention.slot(i - low), i * block
        whole = (first >= seen[0]) & (first + block <= seen[1])
        for (pool, ring), clears in zip(rings, (False, True), strict=True):
            stored, to = ring.stored.at[source], ring.blocks.at[slot]
            plgpu.barrier_wait(ring.copied.at[source])
            pl.when(i - low >= attention.slots)(functools.partial(plgpu.barrier_wait, ring.free.at[slot]))
            if clears:
                pl.when(whole)(functools.partial(convert, stored, to))
                rows = seen[0] - first, seen[1] - first
                pl.when(jnp.logical_not(whole))(functools.partial(convert, stored, to, rows))
            else:
                convert(stored, to)
            plgpu.commit_smem()
            plgpu.barrier_arrive(ring.arrived.at[slot])
            pl.when(i + stages < high)(functools.partial(load, i + stages, pool, ring))
        return carry

    lax.fori_loop(low, jnp.minimum(low + stages, high), start, ())
    lax.fori_loop(low, high, step, ())
    drain_rings(attention, rings, low, high)


def convert(stored: Any, to: Any, seen: tuple[jax.Array, jax.Array] | None = None) -> None:
    """Convert a block, `[block, head_dim]`, to the type of `to`; rows outside `seen` become zeros."""
    rows, columns = stored.shape
    layout = _layout(columns)
    for first in range(0, rows, TILE_ROWS):
        part = plgpu.layout_cast(stored.at[pl.ds(first, TILE_ROWS)][...], layout)
        # It goes through float32, as Hopper has no instruction from fp8 to bfloat16.
        numbers = part.astype(jnp.float32).astype(to.dtype)
        if seen is not None:
            row = plgpu.broadcasted_iota(jnp.int32, numbers.shape, 0, layout=layout) + first
            numbers = jnp.where((row >= seen[0]) & (row < seen[1]), numbers, jnp.zeros((), to.dtype))
        to.at[pl.ds(first, TILE_ROWS)][...] = numbers


def _layout(columns: int) -> Any:
    """Return the layout of a block over threads: warps one below the other, lanes in rows of a line or less."""
    width = math.gcd(columns, _LINE)
    rows = _LANES * _NUMBERS // width
    tiling = plgpu.Tiling(((_WARPS * rows, width), (rows, width), (_NUMBERS,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
