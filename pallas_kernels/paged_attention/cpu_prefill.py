"""Prefill chunks on a CPU: one item is a KV head's queries of one tile of a row, over all tokens that they see.

A block of keys is laid out with tokens side by side, a block of values with its dimensions side by side, once for all
queries of the tile; then both products are the same loop: a strip of 6 rows by 4 registers stays in registers. Where
the CPU multiplies bfloat16, a word holds two neighbours along the sum; else everything is float32.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

from pallas_kernels.cpu import maths
from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.types import F32, I32, I64
from pallas_kernels.paged_attention.cpu_tiles import (
    HALVES,
    LANES,
    MASKED,
    TASK_BYTES,
    VECTOR,
    WORDS,
    Attention,
    Work,
    capped,
    int_at,
    load_row,
    positions,
    splat,
    store_row,
    token_offset,
    zero,
)

_TILE_ROWS = 96
_STRIP = 6
_WIDE = 4
_BLOCK = _WIDE * LANES


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
    """The queries at hand: their first position, how many, and the first position that any of them sees. In memory:
    `queries` in the type of the products, `sums` and, in two registers a row, the peak and the total of each."""

    first: Value
    num_queries: Value
    sees_from: Value
    queries: Value
    sums: Value
    states: Value


def prefill(f: Function, item: Value, tasks: Value, work: Work, facts: Attention, features: frozenset[str]) -> None:
    """Item `item` of tiles times KV heads."""
    exact = facts.dtype == facts.kv_dtype == "bfloat16" and "avx512bf16" in features
    task, head = f.at(tasks, item // work.kv_heads * TASK_BYTES), item % work.kv_heads
    row, offset = (f.load(I64, task, at) for at in (0, 8))
    from_token, to_token = (int_at(f, work.query_starts, row + i) for i in range(2))
    first = int_at(f, work.kv_lens, row) - (to_token - from_token) + offset
    count = f.least(to_token - from_token - offset, _tile_queries(facts))
    rows = -(-_tile_queries(facts) * facts.group // _STRIP) * _STRIP
    sees_from = f.constant(I64, 0) if facts.window is None else f.most(first - (facts.window - 1), 0)
    memory = [
        f.stack(size) for size in (rows * facts.head_dim * (2 if exact else 4), rows * facts.head_dim * 4, rows * 128)
    ]
    tile = _Tile(first, count, sees_from, *memory)
    keys, values = (f.stack(_BLOCK * facts.head_dim * (2 if exact else 4)) for _ in range(2))
    weights = f.stack(_STRIP * _BLOCK * (2 if exact else 4))
    strips = (count * facts.group + (_STRIP - 1)) // _STRIP
    own = ((from_token + offset) * work.kv_heads + head) * (facts.group * facts.head_dim * facts.q_bytes)
    stride = work.kv_heads * (facts.group * facts.head_dim * facts.q_bytes)
    _start(f, tile, strips, f.at(work.q, own), stride, facts, exact)

    def block(at: Value) -> None:
        end = f.least(first + count, at + _BLOCK)
        _lay_out(f, work, facts, row, head, at, end, tile, keys, values, exact)

        def strip(s: Value) -> None:
            begin = s * _STRIP
            last = first + (begin + (_STRIP - 1)) // facts.group

            def advance() -> None:
                _advance(f, tile, begin, at, end, keys, values, weights, facts, exact)

            f.when(last >= at, advance)

        f.loop(strips, strip)

    f.loop(first + count, block, start=sees_from & -_BLOCK, step=_BLOCK)
    _finish(f, tile, f.at(work.out, own), stride, f.at(work.sinks, head * (facts.group * 4)), facts)


def _tile_queries(facts: Attention) -> int:
    return max(1, _TILE_ROWS // facts.group)


def _tiles_of(f: Function, facts: Attention, work: Work, row: Value) -> Value:
    start, stop = (int_at(f, work.query_starts, row + i) for i in range(2))
    return (stop - start + (_tile_queries(facts) - 1)) // _tile_queries(facts)


def _start(f: Function, tile: _Tile, strips: Value, q: Value, stride: Value, facts: Attention, exact: bool) -> None:
    """Queries one below the other, all heads of one token first; rows beyond the last one are zeros."""
    rows, live = strips * _STRIP, tile.num_queries * facts.group
    row_bytes = facts.head_dim * (2 if exact else 4)

    def row(r: Value) -> None:
        to = f.at(tile.queries, r * row_bytes)
        come = f.at(q, r // facts.group * stride + r % facts.group * (facts.head_dim * facts.q_bytes))

        def copy() -> None:
            if exact:
                _copy(f, come, to, row_bytes)
            else:
                store_row(f, load_row(f, come, facts.dtype, facts.head_dim, paired=False), to, "float32", paired=False)

        def clear() -> None:
            for at in range(0, row_bytes, 32):
                f.store(f.constant(HALVES, 0), to, at)

        f.when(r < live, copy, clear)
        for i in range(facts.vectors):
            f.store(zero(f), tile.sums, r * (facts.head_dim * 4) + 64 * i)
        f.store(f.constant(VECTOR, MASKED), tile.states, r * 128)
        f.store(zero(f), tile.states, r * 128 + 64)

    f.loop(rows, row)


def _copy(f: Function, come: Value, to: Value, nbytes: int) -> None:
    for at in range(0, nbytes, 32):
        f.store(f.load(HALVES, come, at), to, at)


def _lay_out(
    f: Function,
    work: Work,
    facts: Attention,
    row: Value,
    head: Value,
    at: Value,
    end: Value,
    tile: _Tile,
    keys: Value,
    values: Value,
    exact: bool,
) -> None:
    """A block's keys and values as both products take them. Values that nobody sees are zeros, as they may be NaN."""

    def group(i: Value) -> None:
        position = at + i * LANES
        offset = token_offset(f, work, facts, row, head, position)
        _lay_out_keys(f, f.at(work.keys, offset), f.at(keys, i * 64), facts, exact)
        tokens = f.at(work.values, offset)
        to = f.at(values, i * (LANES * facts.head_dim * (2 if exact else 4)))
        per_step = 2 if exact else 1

        def step(j: Value) -> None:
            own = []
            for token in range(per_step):
                t = j * per_step + token
                seen = (position + t < end) & (position + t >= tile.sees_from)
                own.append((seen, f.at(tokens, t * facts.kv_row_bytes)))
            _lay_out_values(f, own, f.at(to, j * (facts.head_dim * 4)), facts, exact)

        f.loop((f.least(end - position, LANES) + (per_step - 1)) // per_step, step)

    f.loop((end - at + (LANES - 1)) // LANES, group)


def _lay_out_keys(f: Function, tokens: Value, to: Value, facts: Attention, exact: bool) -> None:
    """Of 16 tokens, a word of each side by side."""
    words = facts.head_dim // 2 if exact else facts.head_dim
    for first in range(0, words, LANES):
        count = min(LANES, words - first)
        rows = []
        for token in range(LANES):
            pointer = f.at(tokens, token * facts.kv_row_bytes)
            if exact:
                some = f.load(I32.times(count), pointer, first * 4)
                rows.append(some if count == LANES else f.shuffle(some, some, [i % count for i in range(LANES)]))
            else:
                pointer = f.at(pointer, first * facts.kv_bytes)
                rows += load_row(f, pointer, facts.kv_dtype, LANES, paired=False)
        for i, column in enumerate(maths.transposed(f, rows)[:count]):
            f.store(column, to, (first + i) * (_BLOCK * 4))


def _lay_out_values(
    f: Function, tokens: Sequence[tuple[Value, Value]], to: Value, facts: Attention, exact: bool
) -> None:
    """Of a token, or of two neighbours, each with whether it is seen."""
    for i in range(facts.vectors):
        if exact:
            pair = []
            for seen, pointer in tokens:
                row = f.load(HALVES, pointer, 32 * i)
                pair.append(f.select(f.spread(seen, LANES), row, 0))
            lanes = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
            f.store(f.shuffle(pair[0], pair[1], lanes), to, 64 * i)
        else:
            seen, pointer = tokens[0]
            (row,) = load_row(f, f.at(pointer, i * LANES * facts.kv_bytes), facts.kv_dtype, LANES, paired=False)
            f.store(f.select(f.spread(seen, LANES), row, 0.0), to, 64 * i)


def _advance(
    f: Function,
    tile: _Tile,
    begin: Value,
    at: Value,
    end: Value,
    keys: Value,
    values: Value,
    weights: Value,
    facts: Attention,
    exact: bool,
) -> None:
    """A strip of rows one block further."""
    size = 2 if exact else 4
    queries = f.at(tile.queries, begin * (facts.head_dim * size))
    words = facts.head_dim * size // 4
    logits = _product(
        f, queries, facts.head_dim * size, keys, _BLOCK * 4, f.constant(I64, words), [[zero(f)] * _WIDE] * _STRIP, exact
    )
    keeps = []
    for r in range(_STRIP):
        state = f.at(tile.states, (begin + r) * 128)
        asked = tile.first + (begin + r) // facts.group
        keep, shares = _weigh(f, logits[r], state, at, asked, facts)
        keeps.append(keep)
        for i, share in enumerate(shares):
            if exact:
                f.store(f.to_bf16(share), weights, r * _BLOCK * 2 + 32 * i)
            else:
                f.store(share, weights, r * _BLOCK * 4 + 64 * i)
    row_bytes = facts.head_dim * 4
    steps = (end - at + 1) // 2 if exact else end - at
    for first in range(0, facts.vectors, _WIDE):
        count = min(_WIDE, facts.vectors - first)
        sums = [
            [f.at(tile.sums, (begin + r) * row_bytes + 64 * (first + i)) for i in range(count)] for r in range(_STRIP)
        ]
        start = [[f.load(VECTOR, pointer) * keep for pointer in own] for own, keep in zip(sums, keeps, strict=True)]
        done = _product(f, weights, _BLOCK * size, f.at(values, 64 * first), row_bytes, steps, start, exact)
        for own, row in zip(sums, done, strict=True):
            for pointer, value in zip(own, row, strict=True):
                f.store(value, pointer)


def _weigh(
    f: Function, logits: list[Value], state: Value, at: Value, asked: Value, facts: Attention
) -> tuple[Value, list[Value]]:
    """What is kept of a row's sums, and the weights of a block's tokens."""
    seen = []
    for i in range(_WIDE):
        position = positions(f, at + i * LANES)
        mask = position <= splat(f, asked)
        if facts.window is not None:
            mask = mask & (position > splat(f, asked - facts.window))
        seen.append(mask)
    logits = [f.select(mask, capped(f, x, facts), MASKED) for mask, x in zip(seen, logits, strict=True)]
    old, total = (f.load(VECTOR, state, 64 * i) for i in range(2))
    high = f.most(f.most(logits[0], logits[1]), f.most(logits[2], logits[3]))
    peak = f.most(old, maths.everywhere(f, high, f.most))
    keep = maths.exp(f, old - peak)
    shares = [maths.exp(f, x - peak) for x in logits]
    if facts.window is not None:  # else every row sees its first block
        shares = [f.select(mask, x, 0.0) for mask, x in zip(seen, shares, strict=True)]
    total = f.fma(total, keep, (shares[0] + shares[1]) + (shares[2] + shares[3]))
    f.store(peak, state)
    f.store(total, state, 64)
    return keep, shares


def _product(
    f: Function,
    left: Value,
    left_stride: int,
    right: Value,
    right_stride: int,
    steps: Value,
    start: list[list[Value]],
    exact: bool,
) -> list[list[Value]]:
    """`start` and the products of rows of words, each in every lane, with registers of words."""
    count = len(start[0])

    def step(k: Value, *sums: Value) -> list[Value]:
        columns = [f.load(WORDS if exact else VECTOR, right, k * right_stride + 64 * i) for i in range(count)]
        out = []
        for r in range(_STRIP):
            word = f.spread(f.load(I32 if exact else F32, left, k * 4 + r * left_stride), LANES)
            for column, total in zip(columns, sums[r * count :], strict=False):
                out.append(f.dot_bf16(column, word, total) if exact else f.fma(column, word, total))
        return out

    done = f.loop(steps, step, *(x for row in start for x in row))
    return [done[r * count : (r + 1) * count] for r in range(_STRIP)]


def _finish(f: Function, tile: _Tile, out: Value, stride: Value, sinks: Value, facts: Attention) -> None:
    """Normalizes; a sink adds its exponential to the denominator."""

    def row(r: Value) -> None:
        head = r % facts.group
        peak, total = (f.load(VECTOR, tile.states, r * 128 + at) for at in (0, 64))
        total = maths.everywhere(f, total, operator.add)
        share = f.constant(VECTOR, 1.0)
        if facts.sinks:
            sink = f.spread(f.load(F32, sinks, head * 4), LANES)
            high = f.most(peak, sink)
            share = maths.exp(f, peak - high)
            total = f.fma(total, share, maths.exp(f, sink - high))
        share = share / total
        sums = [f.load(VECTOR, tile.sums, r * (facts.head_dim * 4) + 64 * i) * share for i in range(facts.vectors)]
        to = f.at(out, r // facts.group * stride + head * (facts.head_dim * facts.q_bytes))
        store_row(f, sums, to, facts.dtype, paired=False)

    f.loop(tile.num_queries * facts.group, row)
