"""A panel: some columns of the values of one value head, for one block of tokens.

The state's part in the products of keys and queries is computed for a few tokens at a time, each over the whole key in
order. Then the tokens follow each other: a delta needs those before it. Last, the block is folded into the state.
"""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.cpu import maths
from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.types import F32
from pallas_kernels.gated_delta.cpu.operands import (
    LANES,
    NUMBER_BYTES,
    VECTOR,
    HeadOfRow,
    splat,
    to_bf16,
)
from pallas_kernels.gated_delta.cpu.tokens import BlockPart, TokenScratch, convolve
from pallas_kernels.gated_delta.layout import BLOCK

_UNROLL = 4


class PanelSizes(NamedTuple):
    """Columns of a panel, and how many tokens and rows of the state are computed at a time: as registers allow."""

    columns: int
    tokens: int
    rows: int

    @property
    def vectors(self) -> int:
        """Vectors of a row."""
        return self.columns // LANES

    @property
    def row_bytes(self) -> int:
        """Size of a row."""
        return self.columns * 4


def panel_sizes(value_dim: int, features: frozenset[str]) -> PanelSizes:
    """Return the sizes for a CPU."""
    wide = "avx512f" in features
    columns = next(count for count in (64, 32, 16) if value_dim % count == 0 and (wide or count <= 32))
    return PanelSizes(columns, 2 if wide else 1, 4 if wide else 2)


class PanelScratch(NamedTuple):
    """Memory for one panel at a time: of each token its value, and what keys and queries read of the state; the weights
    of earlier deltas in its delta (negative) and in its output, and the deltas as the state gets them."""

    values: Value
    reads: Value
    of_delta: Value
    of_output: Value
    weighted: Value


class Panel(NamedTuple):
    """A panel: its value head in the group, and its first column in the head."""

    head: Value
    column: Value
    sizes: PanelSizes
    scratch: PanelScratch
    row: HeadOfRow
    tokens: TokenScratch
    deltas: Value


class StatePart(NamedTuple):
    """Where the rows of a panel's state begin, and how far apart they are."""

    pointer: Value
    row_bytes: Value


def panel_scratch(f: Function, sizes: PanelSizes) -> PanelScratch:
    """Allocate the scratch of an item."""
    columns, matrix = BLOCK * sizes.row_bytes, BLOCK * VECTOR.nbytes
    return PanelScratch(*(f.stack(size) for size in (columns, 2 * columns, matrix, matrix, columns)))


def compute_panel(f: Function, panel: Panel, state: StatePart, part: BlockPart, features: frozenset[str]) -> None:
    """Compute outputs and deltas of the new tokens of a block."""
    facts, sizes = panel.row.facts, panel.sizes
    channel = panel.head * facts.value_dim + panel.column + 2 * facts.key_dim
    values = f.at(panel.scratch.values, part.start * sizes.row_bytes)
    convolve(f, panel.row, panel.tokens, part, channel, values, sizes.columns)
    whole = part.start + (part.stop - part.start) // sizes.tokens * sizes.tokens
    f.loop(whole, lambda i: _read(f, panel, state, part, i, sizes.tokens), start=part.start, step=sizes.tokens)
    if sizes.tokens > 1:
        f.loop(part.stop, lambda i: _read(f, panel, state, part, i, 1), start=whole)
    _weigh(f, panel, part)
    f.loop(part.stop, lambda i: _token(f, panel, part, i, features), start=part.start)


def _read(f: Function, panel: Panel, state: StatePart, part: BlockPart, first: Value, count: int) -> None:
    """Multiply the state by the keys and queries of `count` tokens."""
    key_bytes, sizes = panel.row.facts.key_dim * 4, panel.sizes
    rows = [
        f.at(some, (at + first + i) * key_bytes)
        for i in range(count)
        for some, at in ((panel.tokens.keys, part.entry), (panel.tokens.queries, 0))
    ]

    def add(d: Value, *sums: Value) -> list[Value]:
        for step in range(_UNROLL):
            columns = f.at(state.pointer, (d + step) * state.row_bytes)
            numbers = [f.load(VECTOR, columns, i * VECTOR.nbytes) for i in range(sizes.vectors)]
            factors = [splat(f, row, (d + step) * 4) for row in rows]
            products = [(factor, number) for factor in factors for number in numbers]
            sums = tuple(f.fma(*pair, total) for pair, total in zip(products, sums, strict=True))
        return list(sums)

    zeros = [f.constant(VECTOR, 0.0)] * (len(rows) * sizes.vectors)
    to = f.at(panel.scratch.reads, first * (2 * sizes.row_bytes))
    for i, total in enumerate(f.loop(panel.row.facts.key_dim, add, *zeros, step=_UNROLL)):
        f.store(total, to, i * VECTOR.nbytes)


def _weigh(f: Function, panel: Panel, part: BlockPart) -> None:
    """Store the weights of the deltas of a block in those of later tokens and in outputs."""
    own = f.at(panel.tokens.sums, (panel.head * panel.row.facts.ring + part.entry) * 4)
    sums = f.load(VECTOR, own)

    def weigh(i: Value) -> None:
        decay, at = maths.exp(f, splat(f, own, i * 4) - sums), i * VECTOR.nbytes
        f.store(0.0 - decay * f.load(VECTOR, panel.tokens.keys_by_keys, at), panel.scratch.of_delta, at)
        f.store(decay * f.load(VECTOR, panel.tokens.queries_by_keys, at), panel.scratch.of_output, at)

    f.loop(part.stop, weigh, start=part.start)


def _token(f: Function, panel: Panel, part: BlockPart, i: Value, features: frozenset[str]) -> None:
    """Compute the delta and the output of a token, from those before it."""
    facts, sizes, scratch = panel.row.facts, panel.sizes, panel.scratch
    vectors = range(sizes.vectors)
    of_head = panel.head * VECTOR.nbytes + i * 4
    decay, beta = splat(f, panel.tokens.decays, of_head), splat(f, panel.tokens.betas, of_head)
    reads, value = f.at(scratch.reads, i * (2 * sizes.row_bytes)), f.at(scratch.values, i * sizes.row_bytes)
    of_key, of_query, values = (
        [f.load(VECTOR, some, at + j * VECTOR.nbytes) for j in vectors]
        for some, at in ((reads, 0), (reads, sizes.row_bytes), (value, 0))
    )
    wanted = [f.fma(0.0 - decay, one, value) for one, value in zip(of_key, values, strict=True)]
    outputs = [decay * one for one in of_query]
    weights = [f.at(some, i * VECTOR.nbytes) for some in (scratch.of_delta, scratch.of_output)]
    deltas = f.at(panel.deltas, part.entry * (facts.value_dim * 4))

    def add(j: Value, *sums: Value) -> list[Value]:
        of_delta, of_output = (splat(f, some, j * 4) for some in weights)
        numbers = [f.load(VECTOR, deltas, j * (facts.value_dim * 4) + v * VECTOR.nbytes) for v in vectors]
        factors = [of_delta] * sizes.vectors + [of_output] * sizes.vectors
        return [f.fma(factor, x, total) for factor, x, total in zip(factors, numbers * 2, sums, strict=True)]

    sums = f.loop(i, add, *wanted, *outputs)
    of_own = splat(f, weights[1], i * 4)
    token = panel.row.first_token + part.at + i - panel.row.begin
    value_head = (token * panel.row.operands.key_heads + panel.row.head) * facts.group + panel.head
    size = NUMBER_BYTES[facts.dtype]
    out = f.at(panel.row.operands.out, (value_head * facts.value_dim + panel.column) * size)
    for v, (total, output) in enumerate(zip(sums[: sizes.vectors], sums[sizes.vectors :], strict=True)):
        delta = beta * total
        f.store(delta, deltas, i * (facts.value_dim * 4) + v * VECTOR.nbytes)
        output = f.fma(of_own, delta, output)
        output = output if facts.dtype == "float32" else to_bf16(f, output, features)
        f.store(output, out, v * LANES * size)


def fold_panel(f: Function, panel: Panel, state: StatePart, to: StatePart, part: BlockPart) -> None:
    """Store the state after a whole block. `to` may be `state` itself."""
    facts, sizes = panel.row.facts, panel.sizes
    vectors = range(sizes.vectors)
    own = f.at(panel.tokens.sums, (panel.head * facts.ring + part.entry) * 4)
    left = f.stack(VECTOR.nbytes)
    f.store(maths.exp(f, splat(f, own, (BLOCK - 1) * 4) - f.load(VECTOR, own)), left)
    deltas = f.at(panel.deltas, part.entry * (facts.value_dim * 4))

    def weigh(j: Value) -> None:
        factor = splat(f, left, j * 4)
        for v in vectors:
            delta = f.load(VECTOR, deltas, j * (facts.value_dim * 4) + v * VECTOR.nbytes)
            f.store(factor * delta, panel.scratch.weighted, j * sizes.row_bytes + v * VECTOR.nbytes)

    f.loop(BLOCK, weigh)
    decay = splat(f, panel.tokens.decays, panel.head * VECTOR.nbytes + (BLOCK - 1) * 4)
    keys = f.at(panel.tokens.keys, part.entry * (facts.key_dim * 4))

    def fold_rows(d: Value) -> None:
        pointers = [f.at(state.pointer, (d + i) * state.row_bytes) for i in range(sizes.rows)]
        numbers = [f.load(VECTOR, pointer, v * VECTOR.nbytes) for pointer in pointers for v in vectors]
        begin = [decay * number for number in numbers]

        def add(j: Value, *sums: Value) -> list[Value]:
            for step in range(2):
                key = f.at(keys, ((j + step) * facts.key_dim + d) * 4)
                factors = [f.broadcast(f.load(F32, key, 4 * i), LANES) for i in range(sizes.rows)]
                delta = f.at(panel.scratch.weighted, (j + step) * sizes.row_bytes)
                numbers = [f.load(VECTOR, delta, v * VECTOR.nbytes) for v in vectors]
                products = [(factor, number) for factor in factors for number in numbers]
                sums = tuple(f.fma(*pair, total) for pair, total in zip(products, sums, strict=True))
            return list(sums)

        for i, total in enumerate(f.loop(BLOCK, add, *begin, step=2)):
            row, v = divmod(i, sizes.vectors)
            f.store(total, f.at(to.pointer, (d + row) * to.row_bytes), v * VECTOR.nbytes)

    f.loop(facts.key_dim, fold_rows, step=sizes.rows)
