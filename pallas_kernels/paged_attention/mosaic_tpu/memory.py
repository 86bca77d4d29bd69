"""The memory of the TPU kernel: its operands, its scratch memory, its tiles, and every DMA copy.

A tile is some queries of one row. Its own positions, whole units of memory around its new tokens, are read from the
pool and written back. The row's earlier tokens are read by pages, a block of pages at a time. Latent rows are read
once: their first lanes are the values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

LANES = 128
_TABLES = 4

# A reference to memory inside a kernel; and the function to apply to a copy: `start` or `wait`.
Ref = Any
Act = Callable[[Any], None]


@dataclasses.dataclass(frozen=True)
class TpuAttention:
    """The static facts of a kernel, which `writes` new tokens or only reads.

    `unit` is the number of positions that can be written at a time. The values of latent rows are their first
    `value_lanes`, which may hold some numbers that are not of the value.
    """

    kv_heads: int
    group: int
    lanes: int
    page_size: int
    unit: int
    dtype: np.dtype
    kv_dtype: np.dtype
    joined: bool
    scale: float
    window: int | None
    soft_cap: float | None
    writes: bool
    value_lanes: int | None = None

    @property
    def arrays(self) -> int:
        """The number of arrays of the pool."""
        return 1 if self.joined or self.value_lanes is not None else 2

    @property
    def out_lanes(self) -> int:
        """The lanes of the output."""
        return self.lanes if self.value_lanes is None else self.value_lanes


@dataclasses.dataclass(frozen=True)
class LoopSizes:
    """The sizes of one loop: queries of a tile, pages of a block, KV heads that are multiplied at once.

    The queries of a tile are multiplied in `parts`, one after another; more than one only for latent rows. With
    `whole_rows`, a tile has all queries of its row.
    """

    queries: int
    pages: int
    heads: int
    parts: int = 1
    whole_rows: bool = False


class KernelOperands(NamedTuple):
    """The arrays that a kernel reads.

    `new` has as many arrays as the pool, or none if the kernel only reads it. `counts` are
    decodes, tiles, and the layer's first entry. Small integers are in scalar memory, `scales` and `sinks` in vector
    memory, the rest in HBM.
    """

    counts: Ref
    query_starts: Ref
    kv_lens: Ref
    tile_rows: Ref
    tile_numbers: Ref
    scales: Ref | None
    sinks: Ref | None
    page_table: Ref
    q: Ref
    new: tuple[Ref, ...]


class KernelResults(NamedTuple):
    """The arrays that a kernel writes; `pools` has one if keys and values are joined or rows are latent, else two."""

    out: Ref
    pools: tuple[Ref, ...]


class LoopScratch(NamedTuple):
    """The memory and semaphores of one loop; arrays that are copied ahead have two buffers."""

    table: Ref
    q: Ref
    new: tuple[Ref, ...]
    own: tuple[Ref, ...]
    past: tuple[Ref, ...]
    out: Ref
    queries: Ref
    sums: Ref
    peaks: Ref
    totals: Ref
    table_done: Ref
    inputs_done: Ref
    writes_done: Ref
    past_done: Ref
    out_done: Ref


class Tile(NamedTuple):
    """The scalars of a tile. Its queries have positions [`position`, `end`); its own positions begin at `base`.

    `first` is the first position that it sees. Before `base`, `num_blocks` blocks are read, from `first_block` on.
    """

    number: Array
    row: Array
    token: Array
    position: Array
    base: Array
    end: Array
    first: Array
    first_block: Array
    num_blocks: Array


def own_positions(attention: TpuAttention, sizes: LoopSizes) -> int:
    """Return the number of positions around a tile's new tokens that are read, merged and written back."""
    if sizes.whole_rows:  # The first query may be the last of a unit.
        most = sizes.queries + attention.unit - 1
        return most + -most % attention.unit
    return max(sizes.queries, attention.unit)


def scratch_types(attention: TpuAttention, sizes: LoopSizes, pages: int) -> LoopScratch:
    """Return the memory that a loop allocates; `pages` is the width of the page table."""
    heads, lanes, arrays = attention.kv_heads, attention.lanes, attention.arrays
    own = own_positions(attention, sizes)
    # Tiles begin at units, so a row's first query may be up to a unit into its first tile.
    new_rows = 1 if sizes.queries == 1 else own + attention.unit
    # More than one part is of a single head.
    parts = heads * sizes.parts, sizes.queries // sizes.parts * attention.group
    state = pltpu.VMEM((*parts, LANES), jnp.float32)
    queries = 2, sizes.queries, heads, attention.group
    return LoopScratch(
        table=pltpu.SMEM((_TABLES, 1, pages), jnp.int32),
        q=pltpu.VMEM((*queries, lanes), attention.dtype),
        new=(pltpu.VMEM((2, new_rows, heads, 1, lanes), new_dtype(attention.kv_dtype)),) * (arrays * attention.writes),
        own=(pltpu.VMEM((2, heads, own // attention.unit, attention.unit, lanes), attention.kv_dtype),) * arrays,
        past=(pltpu.VMEM((2, heads, sizes.pages, attention.page_size, lanes), attention.kv_dtype),) * arrays,
        out=pltpu.VMEM((*queries, attention.out_lanes), attention.dtype),
        queries=pltpu.VMEM((*parts, lanes), attention.dtype),
        sums=pltpu.VMEM((*parts, attention.out_lanes), jnp.float32),
        peaks=state,
        totals=state,
        table_done=pltpu.SemaphoreType.DMA((_TABLES,)),
        inputs_done=pltpu.SemaphoreType.DMA((2,)),
        writes_done=pltpu.SemaphoreType.DMA((2,)),
        past_done=pltpu.SemaphoreType.DMA((2,)),
        out_done=pltpu.SemaphoreType.DMA,
    )


def whole_lanes(width: int) -> int:
    """Return the number of lanes that hold these numbers, rounded up to whole rows of memory."""
    return width + -width % LANES


def new_dtype(kv_dtype: np.dtype) -> np.dtype:
    """Return the dtype of the new tokens' operand: single rows of an 8-bit type can't be addressed."""
    return np.dtype(jnp.bfloat16) if np.dtype(kv_dtype).itemsize == 1 else np.dtype(kv_dtype)


def start(copy: Any) -> None:
    copy.start()


def wait(copy: Any) -> None:
    copy.wait()


@dataclasses.dataclass(frozen=True)
class Copies:
    """All copies of one loop. Each method starts, or waits for, the copies of one kind."""

    attention: TpuAttention
    sizes: LoopSizes
    operands: KernelOperands
    results: KernelResults
    scratch: LoopScratch

    @property
    def chained(self) -> bool:
        """Whether a tile may read what the previous one wrote: chunks have several tiles, decodes one."""
        return self.sizes.queries > 1

    def _row(self, i: Array | int) -> Array:
        return self.operands.tile_rows[i] if self.chained else jnp.asarray(i, jnp.int32)

    def tile(self, i: Array | int) -> Tile:
        attention, operands = self.attention, self.operands
        row = self._row(i)
        first_token, length = operands.query_starts[row], operands.kv_lens[row]
        begin = length - (operands.query_starts[row + 1] - first_token)
        base = begin - lax.rem(begin, attention.unit)
        position = begin
        end = length
        if self.chained:
            base = base + operands.tile_numbers[i] * self.sizes.queries
            position = jnp.maximum(begin, base)
            end = jnp.minimum(length, base + own_positions(attention, self.sizes))
        first = jnp.int32(0) if attention.window is None else jnp.maximum(position - attention.window + 1, 0)
        size = self.sizes.pages * attention.page_size
        first_block = lax.div(first, size)
        num_blocks = jnp.where(first < base, lax.div(base + size - 1, size) - first_block, 0)
        token = first_token + position - begin
        return Tile(jnp.int32(i), row, token, position, base, end, first, first_block, num_blocks)

    def table(self, i: Array | int, act: Act) -> None:
        slot = jnp.int32(i) % _TABLES
        act(
            self._copy(
                self.operands.page_table.at[self._row(i)], self.scratch.table.at[slot], self.scratch.table_done.at[slot]
            )
        )

    def inputs(self, tile: Tile, act: Act) -> None:
        """Copy the queries, the new tokens, and the pool's tokens around them."""
        slot, tokens = tile.number % 2, self.sizes.queries
        done = self.scratch.inputs_done.at[slot]
        act(self._copy(self.operands.q.at[pl.ds(tile.token, tokens)], self.scratch.q.at[slot], done))
        offset = tile.position - tile.base if self.chained else 0
        for new, to in zip(self.operands.new, self.scratch.new, strict=True):
            act(self._copy(new.at[pl.ds(tile.token, tokens)], to.at[slot, pl.ds(offset, tokens)], done))
        self._own(tile, lambda pool, own: act(self._copy(pool, own, done)))

    def writes(self, tile: Tile, act: Act) -> None:
        if not self.attention.writes:
            return
        done = self.scratch.writes_done.at[tile.number % 2]
        self._own(tile, lambda pool, own: act(self._copy(own, pool, done)))

    def _own(self, tile: Tile, copy: Callable[[Ref, Ref], None]) -> None:
        """Call `copy(pool, scratch)` for each unit of the pool that holds own positions of the tile."""
        unit, page_size = self.attention.unit, self.attention.page_size

        def one(u: Array, carry: None) -> None:
            position = tile.base + u * unit
            entry = self._entry(tile, lax.div(position, page_size))
            within = pl.ds(pl.multiple_of(lax.rem(position, page_size), unit), unit)
            for pool, own in zip(self.results.pools, self.scratch.own, strict=True):
                copy(pool.at[entry, :, within], own.at[tile.number % 2, :, u])

        lax.fori_loop(0, lax.div(tile.end - tile.base + unit - 1, unit), one, None)

    def start_first_block(self, tile: Tile, slot: Array | int) -> None:
        """Start the copy of a tile's first block, if it has any."""
        pl.when(tile.num_blocks > 0)(lambda: self.past(tile, tile.first_block, slot, start))

    def past(self, tile: Tile, block: Array, slot: Array | int, act: Act) -> None:
        """Copy a block's pages, from the window's first page on, up to `base` and nothing beyond it."""
        unit, page_size = self.attention.unit, self.attention.page_size
        done, offset = self.scratch.past_done.at[slot], block * self.sizes.pages
        last = lax.div(tile.base, page_size)

        def whole(page: Array, carry: None) -> None:
            entry = self._entry(tile, page)
            for pool, past in zip(self.results.pools, self.scratch.past, strict=True):
                act(self._copy(pool.at[entry], past.at[slot, :, page - offset], done))

        begin = jnp.maximum(offset, lax.div(tile.first, page_size))
        lax.fori_loop(begin, jnp.minimum(offset + self.sizes.pages, last), whole, None)
        if unit == page_size:
            return

        def part(u: Array, carry: None) -> None:
            entry = self._entry(tile, last)
            within = pl.ds(pl.multiple_of(u * unit, unit), unit)
            for pool, past in zip(self.results.pools, self.scratch.past, strict=True):
                act(self._copy(pool.at[entry, :, within], past.at[slot, :, last - offset, within], done))

        units = lax.div(lax.rem(tile.base, page_size), unit)
        lax.fori_loop(0, jnp.where(last < offset + self.sizes.pages, units, 0), part, None)

    def out(self, tile: Tile, act: Act) -> None:
        to = self.results.out.at[pl.ds(tile.token, self.sizes.queries)]
        act(self._copy(self.scratch.out.at[tile.number % 2], to, self.scratch.out_done))

    def _entry(self, tile: Tile, page: Array) -> Array:
        return self.operands.counts[2] + self.scratch.table[tile.number % _TABLES, 0, page]

    @staticmethod
    def _copy(source: Ref, to: Ref, done: Ref) -> Any:
        return pltpu.make_async_copy(source, to, done)
