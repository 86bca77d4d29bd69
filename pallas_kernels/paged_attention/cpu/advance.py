"""How a block of tokens is added to the running softmax of some rows of queries, by vectors or by tile registers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pallas_kernels.cpu import maths
from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.tile_registers import ROW_BYTES, ROWS, TILE_BYTES, TileRegisters
from pallas_kernels.cpu.types import F32, I32, I64
from pallas_kernels.paged_attention.cpu.blocks import (
    BLOCK,
    WIDE,
    BlockScratch,
    Prefetch,
    each_step,
    first_seen,
    query_bytes,
    softmax_weights,
    state_bytes,
    value_vectors,
)
from pallas_kernels.paged_attention.cpu.tiles import LANES, VECTOR, WORDS, zero


class Strip(NamedTuple):
    """Consecutive rows of queries: pointers to the queries and to their states, how many, and each one's position."""

    queries: Value
    states: Value
    rows: int
    position_of: Callable[[Value], Value]


def advance(
    f: Function,
    scratch: BlockScratch,
    strip: Strip,
    at: Value,
    end: Value,
    prefetch: Prefetch | None = None,
) -> None:
    """Add a block whose keys are laid out to the states of a strip.

    Without `prefetch`, its values must be laid out too. With it, values are read from the pool, and each step of both
    products calls `prefetch(pool, first byte, bytes)` for its part of a block: a core has only some reads under way.
    """
    assert scratch.tiles is None
    queries, states, rows, position_of = strip
    query_positions = [position_of(f.constant(I64, r)) for r in range(rows)]
    facts, exact = scratch.facts, scratch.exact
    size = 2 if exact else 4
    words = f.constant(I64, facts.head_dim * size // 4)
    together = max(1, min(WIDE, scratch.sums // len(query_positions)))

    def keys(k: Value, columns: range) -> list[Value]:
        return [f.load(WORDS if exact else VECTOR, scratch.keys, k * (BLOCK * 4) + 64 * i) for i in columns]

    def multiply(left: Value, stride: int, k: Value, columns: Sequence[Value], sums: Sequence[Value]) -> list[Value]:
        """Add the products of word `k` of each row, broadcast to every lane, with the columns."""
        out = []
        for r in range(len(query_positions)):
            word = f.broadcast(f.load(I32 if exact else F32, left, k * 4 + r * stride), LANES)
            for column, total in zip(columns, sums[r * len(columns) :], strict=False):
                out.append(f.dot_bf16(column, word, total) if exact else f.fma(column, word, total))
        return out

    stride = query_bytes(scratch)

    logits: list[list[Value]] = [[] for _ in query_positions]
    for first in range(0, WIDE, together):
        columns = range(first, min(first + together, WIDE))

        def word(k: Value, *sums: Value, columns: range = columns) -> list[Value]:
            if prefetch is not None and columns.start == 0:
                nbytes = BLOCK * facts.kv_row_bytes // (facts.head_dim * size // 4)
                prefetch(scratch.shared.keys, k * nbytes, nbytes)
            return multiply(queries, stride, k, keys(k, columns), sums)

        sums = f.loop(words, word, *[zero(f)] * (len(columns) * len(logits)))
        for r, own in enumerate(logits):
            own += sums[r * len(columns) : (r + 1) * len(columns)]
    keeps = []
    for r, position in enumerate(query_positions):
        state = f.at(states, r * state_bytes(facts))
        keep, shares = softmax_weights(f, logits[r], state, at, position, facts)
        keeps.append(keep)
        for i, share in enumerate(shares):
            if exact:
                f.store(f.to_bf16(share), scratch.weights, r * BLOCK * 2 + 32 * i)
            else:
                f.store(share, scratch.weights, r * BLOCK * 4 + 64 * i)
    for first in range(0, facts.vectors, together):
        columns = range(first, min(first + together, facts.vectors))

        def in_pool(k: Value, masked: bool, *sums: Value, columns: range = columns) -> list[Value]:
            if columns.start == 0 and prefetch is not None:
                nbytes = facts.kv_row_bytes * (2 if exact else 1)
                prefetch(scratch.shared.values, k * nbytes, nbytes)
            values = list(value_vectors(f, scratch, at, end, k, columns, masked))
            return multiply(scratch.weights, BLOCK * size, k, values, sums)

        def laid_out(k: Value, *sums: Value, columns: range = columns) -> list[Value]:
            kind, row = WORDS if exact else VECTOR, k * (facts.head_dim * 4)
            values = [f.load(kind, scratch.values, row + 64 * i) for i in columns]
            return multiply(scratch.weights, BLOCK * size, k, values, sums)

        places = [f.at(states, r * state_bytes(facts) + 64 * i) for r in range(len(query_positions)) for i in columns]
        start = [f.load(VECTOR, place) * keeps[i // len(columns)] for i, place in enumerate(places)]
        if prefetch is not None:
            done = each_step(f, scratch, at, end, in_pool, *start)
        else:
            begin, count = first_seen(f, scratch, at), end - at
            if exact:
                begin, count = begin // 2, (count + 1) // 2
            done = f.loop(count, laid_out, *start, start=begin)
        for place, total in zip(places, done, strict=True):
            f.store(total, place)


def advance_tiles(
    f: Function,
    scratch: BlockScratch,
    tiles: TileRegisters,
    strip: Strip,
    at: Value,
) -> None:
    """Add a block whose logits are stored and whose values are laid out to the states of a strip, as `advance` does.

    The product with values takes all tokens of the block; those that a row doesn't see have the weight 0.
    """
    facts, states, rows = scratch.facts, strip.states, strip.rows

    def weigh(r: Value) -> None:
        state, logits = f.at(states, r * state_bytes(facts)), f.at(scratch.logits, r * (BLOCK * 4))
        own = [f.load(VECTOR, logits, 64 * i) for i in range(WIDE)]
        keep, shares = softmax_weights(f, own, state, at, strip.position_of(r), facts)
        for i, share in enumerate(shares):
            f.store(f.to_bf16(share), scratch.weights, r * (BLOCK * 2) + 32 * i)
        for i in range(facts.vectors):
            f.store(f.load(VECTOR, state, 64 * i) * keep, state, 64 * i)

    f.loop(f.constant(I64, rows), weigh)
    for first in range(0, facts.vectors, WIDE):
        columns = range(first, min(first + WIDE, facts.vectors))
        for number, column in zip(tiles.SUMS, columns):
            tiles.load(number, f.at(states, 64 * column), state_bytes(facts))
        _multiply(f, tiles, (scratch.weights, BLOCK * 2), (scratch.values, facts.value_width * 4), BLOCK // 2, columns)
        for number, column in zip(tiles.SUMS, columns):
            tiles.store(number, f.at(states, 64 * column), state_bytes(facts))


def multiply_keys(f: Function, scratch: BlockScratch, tiles: TileRegisters, queries: Value) -> None:
    """Store as logits the products of rows of queries with keys that are laid out."""
    for number in tiles.SUMS:
        tiles.clear(number)
    words = scratch.facts.head_dim // 2
    _multiply(f, tiles, (queries, query_bytes(scratch)), (scratch.keys, BLOCK * 4), words, range(WIDE))
    for number in tiles.SUMS:
        tiles.store(number, f.at(scratch.logits, 64 * number), BLOCK * 4)


def lay_out_queries(f: Function, scratch: BlockScratch, queries: Value, rows: int, to: Value) -> None:
    """Lay out rows of queries side by side, with zeros beside them, for `multiply_keys_in_pool`."""

    def step(k: Value) -> None:
        own = [f.load(WORDS, queries, k * ROW_BYTES + r * query_bytes(scratch)) for r in range(rows)]
        for i, column in enumerate(maths.transpose(f, own + [f.constant(WORDS, 0)] * (ROWS - rows))):
            f.store(column, to, k * TILE_BYTES + i * ROW_BYTES)

    f.loop(f.constant(I64, query_bytes(scratch) // ROW_BYTES), step)


def multiply_keys_in_pool(
    f: Function,
    scratch: BlockScratch,
    tiles: TileRegisters,
    queries: Value,
    rows: int,
    at: Value,
    end: Value,
    prefetch: Prefetch,
) -> None:
    """Store as logits the products of keys `at` to `end` with rows of queries that are laid out.

    It suits few rows: keys are multiplied as they lie in the pool, 16 tokens at once, and instead of keys the products
    are transposed, which are fewer. See `advance` for `prefetch`.
    """
    facts = scratch.facts
    # Rows are tokens here, and only these registers always have 16
    sums, keys, others = tiles.RIGHT
    products = f.stack(BLOCK * ROW_BYTES)
    first, stop = first_seen(f, scratch, at) // LANES, (end - at + (LANES - 1)) // LANES
    steps = facts.kv_row_bytes // ROW_BYTES

    def multiply_group(i: Value) -> None:
        own = f.at(scratch.shared.keys, f.load(I64, scratch.offsets, i * 8))

        def step(k: Value) -> None:
            tiles.load(keys, f.at(own, k * ROW_BYTES), facts.kv_row_bytes)
            tiles.load(others, f.at(queries, k * TILE_BYTES))
            tiles.add_products(sums, others, keys)
            prefetch(scratch.shared.keys, (i * steps + k) * TILE_BYTES, TILE_BYTES)

        tiles.clear(sums)
        f.loop(f.constant(I64, steps), step)
        tiles.store(sums, f.at(products, i * TILE_BYTES))

    def transpose_group(i: Value) -> None:
        tokens = [f.load(VECTOR, products, i * TILE_BYTES + token * ROW_BYTES) for token in range(ROWS)]
        for r, row in enumerate(maths.transpose(f, tokens)[:rows]):
            f.store(row, scratch.logits, r * (BLOCK * 4) + i * ROW_BYTES)

    f.loop(stop, multiply_group, start=first)
    f.loop(stop, transpose_group, start=first)


def _multiply(
    f: Function,
    tiles: TileRegisters,
    left: tuple[Value, int],
    right: tuple[Value, int],
    words: int,
    columns: range,
) -> None:
    """Add the products of `words` words of each row of `left` with the vectors `columns` of `right` to `SUMS`.

    `left` and `right` are pointers, each with the bytes of a row.
    """
    (rows, row_bytes), (matrix, matrix_bytes) = left, right

    def step(k: Value) -> None:
        tiles.load(tiles.LEFT, f.at(rows, k * ROW_BYTES), row_bytes)
        for number, column, to in zip(tiles.SUMS, columns, itertools.cycle(tiles.RIGHT)):
            tiles.load(to, f.at(matrix, k * (ROWS * matrix_bytes) + 64 * column), matrix_bytes)
            tiles.add_products(number, to)

    f.loop(f.constant(I64, words // LANES), step)
