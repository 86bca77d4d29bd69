"""Prefill chunks on a CPU: an item is the queries of one KV head in one tile of a row, over all tokens they see."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.types import I64
from pallas_kernels.paged_attention.cpu.advance import advance, advance_tiles, causal_strip, multiply_keys
from pallas_kernels.paged_attention.cpu.blocks import (
    BLOCK,
    CHUNK,
    BlockScratch,
    find_tokens,
    lay_out_keys,
    lay_out_values,
    make_scratch,
    merge_state,
    most_rows,
    query_bytes,
    reset_state,
    state_bytes,
    store_query,
    write_output,
)
from pallas_kernels.paged_attention.cpu.tiles import TASK_BYTES, CpuAttention, SharedOperands, int_at

_TILE_ROWS = 96


def num_tiles(f: Function, facts: CpuAttention, shared: SharedOperands, num_seqs: Value) -> Value:
    """Return the number of tiles of all rows that aren't decodes."""

    def add(row: Value, count: Value) -> Value:
        return count + _tiles_of(f, facts, shared, row)

    return f.loop(num_seqs, add, f.constant(I64, 0), start=shared.num_decodes)[0]


def write_tiles(f: Function, facts: CpuAttention, shared: SharedOperands, tasks: Value, num_seqs: Value) -> None:
    """List the tiles. A row's last tiles come first, as they see most tokens."""

    def add(row: Value, count: Value) -> Value:
        tiles = _tiles_of(f, facts, shared, row)

        def write_tile(i: Value) -> None:
            task = f.at(tasks, (count + i) * TASK_BYTES)
            f.store(row, task)
            f.store((tiles - 1 - i) * _tile_queries(facts), task, 8)

        f.loop(tiles, write_tile)
        return count + tiles

    f.loop(num_seqs, add, f.constant(I64, 0), start=shared.num_decodes)


class _QueryTile(NamedTuple):
    """The queries of an item, all heads of a token together: their first position, their number, and their states.

    A strip is `strip_rows` rows that are computed together. `states` has the first chunk's states, into which those of
    each later chunk, `later`, are merged.
    """

    first: Value
    num_queries: Value
    strip_rows: int
    strips: Value
    queries: Value
    states: Value
    later: Value


def prefill(
    f: Function, item: Value, tasks: Value, shared: SharedOperands, facts: CpuAttention, features: frozenset[str]
) -> None:
    """Compute item `item` of tiles times KV heads."""
    task, head = f.at(tasks, item // shared.kv_heads * TASK_BYTES), item % shared.kv_heads
    row, offset = (f.load(I64, task, at) for at in (0, 8))
    from_token, to_token = (int_at(f, shared.query_starts, row + i) for i in range(2))
    first = int_at(f, shared.kv_lens, row) - (to_token - from_token) + offset
    count = f.minimum(to_token - from_token - offset, _tile_queries(facts))
    sees_from = f.constant(I64, 0) if facts.window is None else f.maximum(first - (facts.window - 1), 0)
    # With fewer registers than AVX-512's, the sums of several rows would lie in memory
    strip = most_rows(facts, features) if "avx512f" in features else 1
    scratch = make_scratch(f, shared, facts, row, head, sees_from, features, strip)
    rows = -(-_tile_queries(facts) * facts.group // strip) * strip
    memory = [f.stack(rows * size) for size in (query_bytes(scratch), state_bytes(facts), state_bytes(facts))]
    tile = _QueryTile(first, count, strip, (count * facts.group + (strip - 1)) // strip, *memory)
    own = ((from_token + offset) * shared.kv_heads + head) * (facts.group * facts.head_dim * facts.q_bytes)
    stride = shared.kv_heads * (facts.group * facts.head_dim * facts.q_bytes)
    _store_queries(f, tile, scratch, f.at(shared.q, own), stride)
    end = first + count
    first_chunk = sees_from // CHUNK

    def chunk(c: Value) -> None:
        is_first = c.equals(first_chunk)
        states = f.select(is_first, tile.states, tile.later)
        begin = f.maximum(c * CHUNK, sees_from & -BLOCK)
        f.loop(
            f.minimum((c + 1) * CHUNK, end),
            lambda at: _block(f, tile, scratch, states, at, f.minimum(end, at + BLOCK)),
            start=begin,
            step=BLOCK,
        )
        f.when(is_first, lambda: None, lambda: _merge(f, tile, facts))

    f.loop((end + (CHUNK - 1)) // CHUNK, chunk, start=first_chunk)
    if scratch.tiles is not None:
        scratch.tiles.release()

    def write(r: Value) -> None:
        own_head = r % facts.group
        to = f.at(shared.out, own + r // facts.group * stride + own_head * (facts.head_dim * facts.q_bytes))
        sink = f.at(shared.sinks, (head * facts.group + own_head) * 4) if facts.sinks else None
        write_output(f, f.at(tile.states, r * state_bytes(facts)), sink, to, facts)

    f.loop(count * facts.group, write)


def _tile_queries(facts: CpuAttention) -> int:
    return max(1, _TILE_ROWS // facts.group)


def _tiles_of(f: Function, facts: CpuAttention, shared: SharedOperands, row: Value) -> Value:
    start, stop = (int_at(f, shared.query_starts, row + i) for i in range(2))
    return (stop - start + (_tile_queries(facts) - 1)) // _tile_queries(facts)


def _store_queries(f: Function, tile: _QueryTile, scratch: BlockScratch, q: Value, stride: Value) -> None:
    """Store the queries, zeros for rows beyond the last one, and reset all states."""
    facts = scratch.facts
    live = tile.num_queries * facts.group

    def row(r: Value) -> None:
        to = f.at(tile.queries, r * query_bytes(scratch))
        source = f.at(q, r // facts.group * stride + r % facts.group * (facts.head_dim * facts.q_bytes))
        f.when(r < live, lambda: store_query(f, scratch, source, to), lambda: store_query(f, scratch, None, to))
        for states in (tile.states, tile.later):
            reset_state(f, f.at(states, r * state_bytes(facts)), facts)

    f.loop(tile.strips * tile.strip_rows, row)


def _block(f: Function, tile: _QueryTile, scratch: BlockScratch, states: Value, at: Value, end: Value) -> None:
    """Add a block to all rows that see any of it."""
    group = scratch.facts.group
    find_tokens(f, scratch, at, end)
    lay_out_keys(f, scratch, at, end)
    lay_out_values(f, scratch, at, end)

    def attend_strip(s: Value) -> None:
        begin = s * tile.strip_rows
        queries = f.at(tile.queries, begin * query_bytes(scratch))
        own = f.at(states, begin * state_bytes(scratch.facts))

        def attend() -> None:
            def position_of(r: Value) -> Value:
                return tile.first + (begin + r) // group

            strip = causal_strip(f, scratch.facts, at, (queries, own), tile.strip_rows, position_of)
            if scratch.tiles is None:
                advance(f, scratch, strip, at, end)
            else:
                multiply_keys(f, scratch, scratch.tiles, queries)
                advance_tiles(f, scratch, scratch.tiles, strip)

        f.when(tile.first + (begin + (tile.strip_rows - 1)) // group >= at, attend)

    f.loop(tile.strips, attend_strip)


def _merge(f: Function, tile: _QueryTile, facts: CpuAttention) -> None:
    """Merge the states of a finished chunk and reset them."""

    def row(r: Value) -> None:
        later = f.at(tile.later, r * state_bytes(facts))
        merge_state(f, f.at(tile.states, r * state_bytes(facts)), later, facts)
        reset_state(f, later, facts)

    f.loop(tile.num_queries * facts.group, row)
