"""What the TPU kernel moves: its operands, its scratch memory, the tiles it works off, and every copy by DMA.

A tile is some queries of one row. Its own positions, whole units of memory around its new tokens, are read from the
pool and written back; what the row holds before them comes by pages, a block of them at a time.
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

# A reference to memory that a kernel sees, a copy between two of them, and what is done with one: start or wait.
Ref = Any
Act = Callable[[Any], None]


@dataclasses.dataclass(frozen=True)
class Form:
    """Static facts of a kernel. `unit` is the number of positions that can be written at a time."""

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


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes of one loop: queries of a tile, pages of a block, KV heads that are multiplied at once."""

    queries: int
    pages: int
    heads: int


class Given(NamedTuple):
    """What a kernel reads. `new` is one array where keys and values are joined, else two.

    `counts` are decodes, tiles, and the layer's first entry. Small integers lie in scalar memory, `scales` and `sinks`
    in vector memory, the rest in HBM.
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


class Written(NamedTuple):
    """What a kernel writes; `pools` are as many as `Given.new`."""

    out: Ref
    pools: tuple[Ref, ...]


class Scratch(NamedTuple):
    """Memory and semaphores of one loop; what is copied ahead has two of each."""

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
    """Scalars of a tile. It asks for positions [`position`, `end`), its own positions begin at `base`.

    `first` is the first position that it sees, and of the blocks before `base` those from `first_block` on are read.
    """

    number: Array
    row: Array
    token: Array
    position: Array
    base: Array
    end: Array
    first: Array
    first_block: Array
    blocks: Array


def own_positions(form: Form, blocks: Blocks) -> int:
    """Positions around a tile's new tokens that are read, merged and written back."""
    return max(blocks.queries, form.unit)


def scratch_types(form: Form, blocks: Blocks, pages: int) -> Scratch:
    """What a loop allocates; `pages` is the width of the page table."""
    heads, lanes, rows = form.kv_heads, form.lanes, blocks.queries * form.group
    own = own_positions(form, blocks)
    arrays = 1 if form.joined else 2
    # Tiles begin at units, so that a row's first queries lie up to a unit into the first one.
    new_rows = 1 if blocks.queries == 1 else own + form.unit
    state = pltpu.VMEM((heads, rows, LANES), jnp.float32)
    queries = pltpu.VMEM((2, blocks.queries, heads, form.group, lanes), form.dtype)
    return Scratch(
        table=pltpu.SMEM((_TABLES, 1, pages), jnp.int32),
        q=queries,
        new=(pltpu.VMEM((2, new_rows, heads, 1, lanes), new_dtype(form.kv_dtype)),) * arrays,
        own=(pltpu.VMEM((2, heads, own // form.unit, form.unit, lanes), form.kv_dtype),) * arrays,
        past=(pltpu.VMEM((2, heads, blocks.pages, form.page_size, lanes), form.kv_dtype),) * arrays,
        out=queries,
        queries=pltpu.VMEM((heads, rows, lanes), form.dtype),
        sums=pltpu.VMEM((heads, rows, lanes), jnp.float32),
        peaks=state,
        totals=state,
        table_done=pltpu.SemaphoreType.DMA((_TABLES,)),
        inputs_done=pltpu.SemaphoreType.DMA((2,)),
        writes_done=pltpu.SemaphoreType.DMA((2,)),
        past_done=pltpu.SemaphoreType.DMA((2,)),
        out_done=pltpu.SemaphoreType.DMA,
    )


def new_dtype(kv_dtype: np.dtype) -> np.dtype:
    """What new tokens come in: single rows of eight bits can't be addressed."""
    return np.dtype(jnp.bfloat16) if np.dtype(kv_dtype).itemsize == 1 else np.dtype(kv_dtype)


def start(copy: Any) -> None:
    copy.start()


def wait(copy: Any) -> None:
    copy.wait()


@dataclasses.dataclass(frozen=True)
class Copies:
    """All copies of one loop. Each method names those of one kind, to be started or waited for."""

    form: Form
    blocks: Blocks
    given: Given
    written: Written
    scratch: Scratch

    @property
    def chained(self) -> bool:
        """Whether a tile may read what the one before has written: chunks have several tiles, decodes one."""
        return self.blocks.queries > 1

    def _row(self, i: Array | int) -> Array:
        return self.given.tile_rows[i] if self.chained else jnp.asarray(i, jnp.int32)

    def tile(self, i: Array | int) -> Tile:
        form, given = self.form, self.given
        row = self._row(i)
        first_token, length = given.query_starts[row], given.kv_lens[row]
        begin = length - (given.query_starts[row + 1] - first_token)
        base = begin - lax.rem(begin, form.unit)
        position = begin
        end = length
        if self.chained:
            base = base + given.tile_numbers[i] * self.blocks.queries
            position = jnp.maximum(begin, base)
            end = jnp.minimum(length, base + self.blocks.queries)
        first = jnp.int32(0) if form.window is None else jnp.maximum(position - form.window + 1, 0)
        size = self.blocks.pages * form.page_size
        first_block = lax.div(first, size)
        blocks = jnp.where(first < base, lax.div(base + size - 1, size) - first_block, 0)
        token = first_token + position - begin
        return Tile(jnp.int32(i), row, token, position, base, end, first, first_block, blocks)

    def table(self, i: Array | int, act: Act) -> None:
        slot = jnp.int32(i) % _TABLES
        act(
            self._copy(
                self.given.page_table.at[self._row(i)], self.scratch.table.at[slot], self.scratch.table_done.at[slot]
            )
        )

    def inputs(self, tile: Tile, act: Act) -> None:
        """Queries, new tokens, and what the pool holds around them."""
        slot, tokens = tile.number % 2, self.blocks.queries
        done = self.scratch.inputs_done.at[slot]
        act(self._copy(self.given.q.at[pl.ds(tile.token, tokens)], self.scratch.q.at[slot], done))
        offset = tile.position - tile.base if self.chained else 0
        for new, to in zip(self.given.new, self.scratch.new, strict=True):
            act(self._copy(new.at[pl.ds(tile.token, tokens)], to.at[slot, pl.ds(offset, tokens)], done))
        self._own(tile, lambda pool, own: act(self._copy(pool, own, done)))

    def writes(self, tile: Tile, act: Act) -> None:
        done = self.scratch.writes_done.at[tile.number % 2]
        self._own(tile, lambda pool, own: act(self._copy(own, pool, done)))

    def _own(self, tile: Tile, copy: Callable[[Ref, Ref], None]) -> None:
        """Units of the pool that hold the tile's own positions, and where they lie here."""
        unit, page_size = self.form.unit, self.form.page_size

        def one(u: Array, carry: None) -> None:
            position = tile.base + u * unit
            entry = self._entry(tile, lax.div(position, page_size))
            within = pl.ds(pl.multiple_of(lax.rem(position, page_size), unit), unit)
            for pool, own in zip(self.written.pools, self.scratch.own, strict=True):
                copy(pool.at[entry, :, within], own.at[tile.number % 2, :, u])

        lax.fori_loop(0, lax.div(tile.end - tile.base + unit - 1, unit), one, None)

    def first_past(self, tile: Tile, slot: Array | int) -> None:
        """Starts a tile's first block, if it has any."""
        pl.when(tile.blocks > 0)(lambda: self.past(tile, tile.first_block, slot, start))

    def past(self, tile: Tile, block: Array, slot: Array | int, act: Act) -> None:
        """Pages of a block from the window's first on, as far as they lie before `base`, and nothing beyond it."""
        unit, page_size = self.form.unit, self.form.page_size
        done, offset = self.scratch.past_done.at[slot], block * self.blocks.pages
        last = lax.div(tile.base, page_size)

        def whole(page: Array, carry: None) -> None:
            entry = self._entry(tile, page)
            for pool, past in zip(self.written.pools, self.scratch.past, strict=True):
                act(self._copy(pool.at[entry], past.at[slot, :, page - offset], done))

        begin = jnp.maximum(offset, lax.div(tile.first, page_size))
        lax.fori_loop(begin, jnp.minimum(offset + self.blocks.pages, last), whole, None)
        if unit == page_size:
            return

        def part(u: Array, carry: None) -> None:
            entry = self._entry(tile, last)
            within = pl.ds(pl.multiple_of(u * unit, unit), unit)
            for pool, past in zip(self.written.pools, self.scratch.past, strict=True):
                act(self._copy(pool.at[entry, :, within], past.at[slot, :, last - offset, within], done))

        units = lax.div(lax.rem(tile.base, page_size), unit)
        lax.fori_loop(0, jnp.where(last < offset + self.blocks.pages, units, 0), part, None)

    def out(self, tile: Tile, act: Act) -> None:
        to = self.written.out.at[pl.ds(tile.token, self.blocks.queries)]
        act(self._copy(self.scratch.out.at[tile.number % 2], to, self.scratch.out_done))

    def _entry(self, tile: Tile, page: Array) -> Array:
        return self.given.counts[2] + self.scratch.table[tile.number % _TABLES, 0, page]

    @staticmethod
    def _copy(source: Ref, to: Ref, done: Ref) -> Any:
        return pltpu.make_async_copy(source, to, done)
