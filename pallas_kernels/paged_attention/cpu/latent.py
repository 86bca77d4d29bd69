"""Attention to latent rows on a CPU: an item is a tile of rows of queries, over all tokens they see or over a chunk.

A row of queries is one head of one token, so decodes, few queries and prefill chunks are the same to this code, and a
token has the same bits in each. All rows of a sequence are divided into tiles. If they are few, each chunk of tokens is
an item of its own, and the thread that finishes a tile's last chunk merges them, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.types import I1, I64
from pallas_kernels.paged_attention.cpu.advance import causal_strip
from pallas_kernels.paged_attention.cpu.blocks import (
    BLOCK,
    CHUNK,
    BlockScratch,
    make_scratch,
    merge_state,
    reset_state,
    state_bytes,
    write_output,
)
from pallas_kernels.paged_attention.cpu.panels import PANEL, advance_panel, lay_out_block, panel_bytes, store_panel
from pallas_kernels.paged_attention.cpu.tiles import LANES, CpuAttention, SharedOperands, int_at, token_offset

ITEM_BYTES = 48
"""Size of an item's description in `SharedOperands.tasks`."""
MOST_ROWS = 4 * PANEL
"""The most rows of queries in a tile: more share the cost of laying out a block, but fill the cache."""

# Chunks are items of their own if a sequence has at most this many rows of queries: each has a state for each chunk.
_SPLIT_ROWS = 512


class _LatentTile(NamedTuple):
    """Rows of queries of a sequence, from the `first` on, and the tokens that they see: up to `end`, from `sees_from`.

    `position` is the position of the sequence's first query.
    """

    first: Value
    live: Value
    position: Value
    sees_from: Value
    end: Value


def partial_bytes(facts: CpuAttention) -> int:
    """Return the size of the result of an item that is one of several chunks: the states of its rows."""
    return MOST_ROWS * state_bytes(facts)


def count_items(
    f: Function, facts: CpuAttention, shared: SharedOperands, num_seqs: Value, tile_rows: Value
) -> tuple[Value, Value]:
    """Return how many items there are, and how many of them compute one of several chunks of a tile."""

    def add(row: Value, first: Value, items: Value, partials: Value) -> list[Value]:
        count = _num_items(f, facts, shared, row, first, tile_rows)
        return [items + count, partials + f.select(count > 1, count, 0)]

    zero = f.constant(I64, 0)
    items, partials = _each_tile(f, facts, shared, num_seqs, tile_rows, add, zero, zero)
    return items, partials


def write_items(f: Function, facts: CpuAttention, shared: SharedOperands, num_seqs: Value, tile_rows: Value) -> None:
    """List the items. Long prefill chunks come last in a batch and take longest, so tiles are listed backwards."""

    def add(row: Value, first: Value, items: Value, partials: Value) -> list[Value]:
        count = _num_items(f, facts, shared, row, first, tile_rows)

        def write(i: Value) -> None:
            item = f.at(shared.tasks, (items + i) * ITEM_BYTES)
            for at, value in enumerate((row, first, tile_rows, i, count, partials)):
                f.store(value, item, 8 * at)

        f.loop(count, write)
        return [items + count, partials + f.select(count > 1, count, 0)]

    zero = f.constant(I64, 0)
    _each_tile(f, facts, shared, num_seqs, tile_rows, add, zero, zero)


def attend(f: Function, item: Value, shared: SharedOperands, facts: CpuAttention, features: frozenset[str]) -> None:
    """Compute an item."""
    task = f.at(shared.tasks, item * ITEM_BYTES)
    row, first, tile_rows, chunk, chunks, first_partial = (f.load(I64, task, 8 * i) for i in range(6))
    tile = _tile(f, facts, shared, row, first, tile_rows)
    scratch = make_scratch(f, shared, facts, row, f.constant(I64, 0), tile.sees_from, features, PANEL)
    queries = f.stack(MOST_ROWS // PANEL * panel_bytes(scratch))
    states, later = (f.stack(MOST_ROWS * state_bytes(facts)) for _ in range(2))
    panels = (tile.live + (PANEL - 1)) // PANEL
    own = int_at(f, shared.query_starts, row) * facts.group + first
    q = f.at(shared.q, own * (facts.head_dim * facts.q_bytes))

    def store(p: Value) -> None:
        source = f.at(q, p * (PANEL * facts.head_dim * facts.q_bytes))
        store_panel(f, scratch, source, tile.live - p * PANEL, f.at(queries, p * panel_bytes(scratch)))

    def reset(r: Value) -> None:
        for some in (states, later):
            reset_state(f, f.at(some, r * state_bytes(facts)), facts)

    f.loop(panels, store)
    f.loop(panels * PANEL, reset)
    is_split = chunks > 1
    first_chunk = tile.sees_from // CHUNK + chunk
    last_chunk = f.select(is_split, first_chunk + 1, (tile.end + (CHUNK - 1)) // CHUNK)

    def attend_chunk(c: Value) -> None:
        is_first = c.equals(first_chunk)
        into = f.select(is_first, states, later)
        f.loop(
            f.minimum((c + 1) * CHUNK, tile.end),
            lambda at: _block(f, scratch, tile, panels, queries, into, at),
            start=f.maximum(c * CHUNK, tile.sees_from & -BLOCK),
            step=BLOCK,
        )

        def merge_row(r: Value) -> None:
            merge_state(f, f.at(states, r * state_bytes(facts)), f.at(later, r * state_bytes(facts)), facts)
            reset_state(f, f.at(later, r * state_bytes(facts)), facts)

        f.loop(f.select(is_first, f.constant(I64, 0), tile.live), merge_row)

    f.loop(last_chunk, attend_chunk, start=first_chunk)
    if scratch.tiles is not None:
        scratch.tiles.release()

    def write(states: Value) -> None:
        def write_row(r: Value) -> None:
            out = f.at(shared.out, (own + r) * (facts.value_width * facts.q_bytes))
            sink = f.at(shared.sinks, (first + r) % facts.group * 4) if facts.sinks else None
            write_output(f, f.at(states, r * state_bytes(facts)), sink, out, facts)

        f.loop(tile.live, write_row)

    def share() -> None:
        """Store the states of this chunk; the thread that stores those of a tile's last chunk merges them."""
        partials = f.at(shared.partials, first_partial * partial_bytes(facts))
        size, volatile = tile.live * state_bytes(facts), f.constant(I1, 0)
        to = f.at(partials, chunk * partial_bytes(facts))
        f.call("llvm.memcpy.p0.p0.i64", None, to, states, size, volatile)

        def merge_chunks() -> None:
            def merge_row(r: Value) -> None:
                state = f.at(partials, r * state_bytes(facts))
                f.loop(chunks, lambda i: merge_state(f, state, f.at(state, i * partial_bytes(facts)), facts), start=1)

            f.loop(tile.live, merge_row)
            write(partials)

        f.when((f.fetch_add(f.at(shared.counters, first_partial * 8), 1) + 1).equals(chunks), merge_chunks)

    f.when(is_split, share, lambda: write(states))


def _block(
    f: Function, scratch: BlockScratch, tile: _LatentTile, panels: Value, queries: Value, states: Value, at: Value
) -> None:
    """Add a block to all panels that see any of it."""
    end = f.minimum(at + BLOCK, tile.end)
    lay_out_block(f, scratch, at, end)
    group = scratch.facts.group
    # The offsets in the pool of the tokens that are read next, by groups of 16; those of this block if there are none
    ahead = f.stack(BLOCK // LANES * 8)

    def find_next(i: Value) -> None:
        position = at + i * LANES
        later = position + BLOCK
        position = f.select(later < tile.end, later, at)
        zero = f.constant(I64, 0)
        f.store(token_offset(f, scratch.shared, scratch.facts, scratch.row, zero, position), ahead, i * 8)

    f.loop(BLOCK // LANES, find_next)

    def attend_panel(p: Value) -> None:
        begin = tile.first + p * PANEL

        def position_of(r: Value) -> Value:
            return tile.position + (begin + r) // group

        own = f.at(queries, p * panel_bytes(scratch)), f.at(states, p * (PANEL * state_bytes(scratch.facts)))
        panel = causal_strip(f, scratch.facts, at, own, PANEL, position_of)
        sees = position_of(f.constant(I64, PANEL - 1)) >= at
        f.when(sees, lambda: advance_panel(f, scratch, panel, at, end, ahead))

    f.loop(panels, attend_panel)


def _each_tile(
    f: Function,
    facts: CpuAttention,
    shared: SharedOperands,
    num_seqs: Value,
    tile_rows: Value,
    body: Callable[..., Sequence[Value]],
    *carried: Value,
) -> list[Value]:
    """Run `body(row, first row of queries, *carried)` for each tile, the last one first."""
    start = shared.num_decodes if facts.chunks_only else f.constant(I64, 0)

    def of_row(i: Value, *before: Value) -> list[Value]:
        row = start + (num_seqs - 1 - i)
        tiles = (_num_rows(f, facts, shared, row) + (tile_rows - 1)) // tile_rows
        return f.loop(tiles, lambda t, *values: body(row, (tiles - 1 - t) * tile_rows, *values), *before)

    return f.loop(num_seqs, of_row, *carried, start=start)


def _num_rows(f: Function, facts: CpuAttention, shared: SharedOperands, row: Value) -> Value:
    """Return the number of rows of queries of a sequence."""
    start, stop = (int_at(f, shared.query_starts, row + i) for i in range(2))
    return (stop - start) * facts.group


def _num_items(
    f: Function, facts: CpuAttention, shared: SharedOperands, row: Value, first: Value, tile_rows: Value
) -> Value:
    """Return the number of items of a tile."""
    tile = _tile(f, facts, shared, row, first, tile_rows)
    chunks = (tile.end + (CHUNK - 1)) // CHUNK - tile.sees_from // CHUNK
    return f.select(_num_rows(f, facts, shared, row) <= _SPLIT_ROWS, chunks, f.constant(I64, 1))


def _tile(
    f: Function, facts: CpuAttention, shared: SharedOperands, row: Value, first: Value, tile_rows: Value
) -> _LatentTile:
    rows = _num_rows(f, facts, shared, row)
    live = f.minimum(rows - first, tile_rows)
    position = int_at(f, shared.kv_lens, row) - rows // facts.group
    sees_from = f.constant(I64, 0)
    if facts.window is not None:
        sees_from = f.maximum(position + first // facts.group - (facts.window - 1), 0)
    end = position + (first + live - 1) // facts.group + 1
    return _LatentTile(first, live, position, sees_from, end)
