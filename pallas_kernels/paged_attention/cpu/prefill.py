"""Prefill chunks on a CPU: one item is a KV head's queries of one tile of a row, over all tokens that they see."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.types import I64
from pallas_kernels.paged_attention.cpu.blocks import (
    BLOCK,
    CHUNK,
    STRIP,
    Blocks,
    advance,
    clear_state,
    finish,
    lay_out_keys,
    lay_out_values,
    make_blocks,
    merge_state,
    put_query,
    query_bytes,
    state_bytes,
)
from pallas_kernels.paged_attention.cpu.tiles import TASK_BYTES, Attention, Work, int_at

_TILE_ROWS = 96


def num_tiles(f: Function, facts: Attention, work: Work, num_seqs: Value) -> Value:
    """Tiles of all rows that aren't decodes."""

    def add(row: Value, count: Value) -> Value:
        return count + _tiles_of(f, facts, work, row)

    return f.loop(num_seqs, add, f.constant(I64, 0), start=work.num_decodes)[0]


def write_tiles(f: Function, facts: Attention, work: Work, tasks: Value, num_seqs: Value) -> None:
    """Lists the tiles; those at the end of a row, which see the most, first."""

    def add(row: Value, count: Value) -> Value:
        tiles = _tiles_of(f, facts, work, row)

        def one(i: Value) -> None:
            task = f.at(tasks, (count + i) * TASK_BYTES)
            f.store(row, task)
            f.store((tiles - 1 - i) * _tile_queries(facts), task, 8)

        f.loop(tiles, one)
        return count + tiles

    f.loop(num_seqs, add, f.constant(I64, 0), start=work.num_decodes)


class _Tile(NamedTuple):
    """The queries at hand: their first position and how many, all heads of one token first, and the state of each.
    `later` are the states of every chunk but the first."""

    first: Value
    num_queries: Value
    strips: Value
    queries: Value
    states: Value
    later: Value


def prefill(f: Function, item: Value, tasks: Value, work: Work, facts: Attention, features: frozenset[str]) -> None:
    """Item `item` of tiles times KV heads."""
    task, head = f.at(tasks, item // work.kv_heads * TASK_BYTES), item % work.kv_heads
    row, offset = (f.load(I64, task, at) for at in (0, 8))
    from_token, to_token = (int_at(f, work.query_starts, row + i) for i in range(2))
    first = int_at(f, work.kv_lens, row) - (to_token - from_token) + offset
    count = f.least(to_token - from_token - offset, _tile_queries(facts))
    sees_from = f.constant(I64, 0) if facts.window is None else f.most(first - (facts.window - 1), 0)
    blocks = make_blocks(f, work, facts, row, head, sees_from, features)
    rows = -(-_tile_queries(facts) * facts.group // STRIP) * STRIP
    memory = [f.stack(rows * size) for size in (query_bytes(blocks), state_bytes(facts), state_bytes(facts))]
    tile = _Tile(first, count, (count * facts.group + (STRIP - 1)) // STRIP, *memory)
    own = ((from_token + offset) * work.kv_heads + head) * (facts.group * facts.head_dim * facts.q_bytes)
    stride = work.kv_heads * (facts.group * facts.head_dim * facts.q_bytes)
    _start(f, tile, blocks, f.at(work.q, own), stride)
    end = first + count
    first_chunk = sees_from // CHUNK

    def chunk(c: Value) -> None:
        is_first = c.same(first_chunk)
        states = f.select(is_first, tile.states, tile.later)
        begin = f.most(c * CHUNK, sees_from & -BLOCK)
        f.loop(
            f.least((c + 1) * CHUNK, end),
            lambda at: _block(f, tile, blocks, states, at, f.least(end, at + BLOCK)),
            start=begin,
            step=BLOCK,
        )
        f.when(is_first, lambda: None, lambda: _merge(f, tile, facts))

    f.loop((end + (CHUNK - 1)) // CHUNK, chunk, start=first_chunk)

    def write(r: Value) -> None:
        own_head = r % facts.group
        to = f.at(work.out, own + r // facts.group * stride + own_head * (facts.head_dim * facts.q_bytes))
        sink = f.at(work.sinks, (head * facts.group + own_head) * 4)
        finish(f, f.at(tile.states, r * state_bytes(facts)), sink, to, facts)

    f.loop(count * facts.group, write)


def _tile_queries(facts: Attention) -> int:
    return max(1, _TILE_ROWS // facts.group)


def _tiles_of(f: Function, facts: Attention, work: Work, row: Value) -> Value:
    start, stop = (int_at(f, work.query_starts, row + i) for i in range(2))
    return (stop - start + (_tile_queries(facts) - 1)) // _tile_queries(facts)


def _start(f: Function, tile: _Tile, blocks: Blocks, q: Value, stride: Value) -> None:
    """Rows beyond the last one are zeros."""
    facts = blocks.facts
    live = tile.num_queries * facts.group

    def row(r: Value) -> None:
        to = f.at(tile.queries, r * query_bytes(blocks))
        come = f.at(q, r // facts.group * stride + r % facts.group * (facts.head_dim * facts.q_bytes))
        f.when(r < live, lambda: put_query(f, blocks, come, to), lambda: put_query(f, blocks, None, to))
        for states in (tile.states, tile.later):
            clear_state(f, f.at(states, r * state_bytes(facts)), facts)

    f.loop(tile.strips * STRIP, row)


def _block(f: Function, tile: _Tile, blocks: Blocks, states: Value, at: Value, end: Value) -> None:
    """All rows that see anything of a block."""
    group = blocks.facts.group
    lay_out_keys(f, blocks, at, end)
    lay_out_values(f, blocks, at, end)

    def strip(s: Value) -> None:
        begin = s * STRIP
        queries = f.at(tile.queries, begin * query_bytes(blocks))
        own = f.at(states, begin * state_bytes(blocks.facts))

        def go() -> None:
            asked = [tile.first + (begin + r) // group for r in range(STRIP)]
            advance(f, blocks, queries, own, asked, at, end)

        f.when(tile.first + (begin + (STRIP - 1)) // group >= at, go)

    f.loop(tile.strips, strip)


def _merge(f: Function, tile: _Tile, facts: Attention) -> None:
    """A chunk is done."""

    def row(r: Value) -> None:
        later = f.at(tile.later, r * state_bytes(facts))
        merge_state(f, f.at(tile.states, r * state_bytes(facts)), later, facts)
        clear_state(f, later, facts)

    f.loop(tile.num_queries * facts.group, row)
