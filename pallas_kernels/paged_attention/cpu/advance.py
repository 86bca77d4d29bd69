"""How a block of tokens is added to the running softmax of some rows of queries, by vectors or by tile registers."""

from __future__ import annotations

import functools
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
    LaidOut,
    Prefetch,
    each_step,
    first_seen,
    query_bytes,
    seen_logits,
    softmax_weights,
    state_bytes,
    value_vectors,
)
from pallas_kernels.paged_attention.cpu.tiles import LANES, VECTOR, WORDS, CpuAttention, zero

_Multiply = Callable[[Value, Sequence[Value], Sequence[Value]], list[Value]]


class Strip(NamedTuple):
    """Consecutive rows of queries: pointers to the queries and to their states, and how many.

    `logits_of` returns the logits of a row, of its products with the keys of the block.
    """

    queries: Value
    states: Value
    rows: int
    logits_of: Callable[[Value, list[Value]], list[Value]]


def causal_strip(
    f: Function,
    facts: CpuAttention,
    at: Value,
    pointers: Sequence[Value],
    rows: int,
    position_of: Callable[[Value], Value],
) -> Strip:
    """Return a strip of rows that see the tokens up to their positions, for the block at `at`."""
    queries, states = pointers
    return Strip(queries, states, rows, lambda r, products: seen_logits(f, products, at, position_of(r), facts))


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
    if prefetch is None:
        advance_laid_out(f, scratch, strip, first_seen(f, scratch, at), end - at)
        return
    facts, shared, per_step = scratch.facts, scratch.shared, 2 if scratch.exact else 1
    word_bytes = BLOCK * facts.kv_row_bytes // (query_bytes(scratch) // 4)
    step_bytes = facts.kv_row_bytes * per_step

    def add_values(columns: range, multiply: _Multiply, *start: Value) -> list[Value]:
        def step(k: Value, masked: bool, *sums: Value) -> list[Value]:
            if columns.start == 0:
                prefetch(shared.values, k * step_bytes, step_bytes)
            return multiply(k, list(value_vectors(f, scratch, at, end, k, columns, masked)), sums)

        return each_step(f, scratch, at, end, step, *start)

    _advance(f, scratch, strip, add_values, lambda k: prefetch(shared.keys, k * word_bytes, word_bytes))


def advance_laid_out(f: Function, block: LaidOut, strip: Strip, first: Value | int, count: Value) -> None:
    """Add tokens `first` to `count` of a block that is laid out to the states of a strip."""
    if block.exact:
        first, count = first // 2, (count + 1) // 2

    def add_values(columns: range, multiply: _Multiply, *start: Value) -> list[Value]:
        def step(k: Value, *sums: Value) -> list[Value]:
            kind, row = WORDS if block.exact else VECTOR, k * (block.facts.head_dim * 4)
            return multiply(k, [f.load(kind, block.values, row + 64 * i) for i in columns], sums)

        return f.loop(count, step, *start, start=first)

    _advance(f, block, strip, add_values, lambda k: None)


def _advance(
    f: Function,
    block: LaidOut,
    strip: Strip,
    add_values: Callable[..., list[Value]],
    before_word: Callable[[Value], None],
) -> None:
    """Add a block to the states of a strip; `add_values` adds the products of its weights with some columns of values,
    and `before_word` is called before each word of keys."""
    assert block.tiles is None
    queries, states, rows, logits_of = strip
    facts, exact = block.facts, block.exact
    size = 2 if exact else 4
    together = max(1, min(WIDE, block.sums // rows))

    def multiply(left: Value, stride: int, k: Value, columns: Sequence[Value], sums: Sequence[Value]) -> list[Value]:
        """Add the products of word `k` of each row, broadcast to every lane, with the columns."""
        out = []
        for r in range(rows):
            word = f.broadcast(f.load(I32 if exact else F32, left, k * 4 + r * stride), LANES)
            for column, total in zip(columns, sums[r * len(columns) :], strict=False):
                out.append(f.dot_bf16(column, word, total) if exact else f.fma(column, word, total))
        return out

    products: list[list[Value]] = [[] for _ in range(rows)]
    for first in range(0, WIDE, together):
        columns = range(first, min(first + together, WIDE))

        def word(k: Value, *sums: Value, columns: range = columns) -> list[Value]:
            if columns.start == 0:
                before_word(k)
            keys = [f.load(WORDS if exact else VECTOR, block.keys, k * (BLOCK * 4) + 64 * i) for i in columns]
            return multiply(queries, query_bytes(block), k, keys, sums)

        sums = f.loop(query_bytes(block) // 4, word, *[zero(f)] * (len(columns) * rows))
        for r, own in enumerate(products):
            own += sums[r * len(columns) : (r + 1) * len(columns)]
    keeps = []
    for r, own in enumerate(products):
        logits = logits_of(f.constant(I64, r), own)
        keep, shares = softmax_weights(f, logits, f.at(states, r * state_bytes(facts)), facts)
        keeps.append(keep)
        for i, share in enumerate(shares):
            if exact:
                f.store(f.to_bf16(share), block.weights, r * BLOCK * 2 + 32 * i)
            else:
                f.store(share, block.weights, r * BLOCK * 4 + 64 * i)
    by_weights = functools.partial(multiply, block.weights, BLOCK * size)
    for first in range(0, facts.vectors, together):
        columns = range(first, min(first + together, facts.vectors))
        places = [f.at(states, r * state_bytes(facts) + 64 * i) for r in range(rows) for i in columns]
        start = [f.load(VECTOR, place) * keeps[i // len(columns)] for i, place in enumerate(places)]
        for place, total in zip(places, add_values(columns, by_weights, *start), strict=True):
            f.store(total, place)


def advance_tiles(f: Function, scratch: LaidOut, tiles: TileRegisters, strip: Strip) -> None:
    """Add a block whose logits are stored and whose values are laid out to the states of a strip, as `advance` does.

    The product with values takes all tokens of the block; those that a row doesn't see have the weight 0.
    """
    facts, states, rows = scratch.facts, strip.states, strip.rows

    def weigh(r: Value) -> None:
        state, logits = f.at(states, r * state_bytes(facts)), f.at(scratch.logits, r * (BLOCK * 4))
        own = [f.load(VECTOR, logits, 64 * i) for i in range(WIDE)]
        keep, shares = softmax_weights(f, strip.logits_of(r, own), state, facts)
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


def multiply_keys(f: Function, scratch: LaidOut, tiles: TileRegisters, queries: Value) -> None:
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
