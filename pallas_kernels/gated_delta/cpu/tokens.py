"""The tokens of a block for one key head: convolution, norms, gates, and the products of their queries and keys.

Each number of a token is computed in one order, from numbers of its own and of earlier tokens, whichever tokens of the
block a step has.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

from pallas_kernels.cpu import maths
from pallas_kernels.cpu.emit import Function, Module, Value
from pallas_kernels.cpu.types import F32, I64, PTR
from pallas_kernels.gated_delta.cpu import logistic
from pallas_kernels.gated_delta.cpu.operands import (
    LANES,
    NUMBER_BYTES,
    VECTOR,
    CpuDelta,
    HeadOfRow,
    clear_bytes,
    copy_bytes,
    load_number,
    load_numbers,
    splat,
    to_bf16,
)
from pallas_kernels.gated_delta.layout import BLOCK

_NORM_EPS = 1e-6
_HALF = BLOCK // 2
_MATRIX_BYTES = BLOCK * LANES * 4
assert BLOCK == LANES, "a vector has a number for each token of a block"


class TokenScratch(NamedTuple):
    """Memory of an item. Tokens are entries of the ring in `keys` and `sums`, and places in the block elsewhere.

    `conv` has the weights of the convolution by tap, `windows` the pointers to the inputs of a block's tokens and to
    those before them. `sums`, `decays` (their exponentials) and `betas` are by head of the group. A row of
    `keys_by_keys` and of `queries_by_keys` has a token's products with all keys of the block.
    """

    keys: Value
    queries: Value
    conv: Value
    windows: Value
    zeros: Value
    sums: Value
    decays: Value
    betas: Value
    keys_by_keys: Value
    queries_by_keys: Value


class BlockPart(NamedTuple):
    """The new tokens of a block: the places from `start` to `stop` of the block that begins at position `at`.

    `entry` is the block's first entry in the ring.
    """

    at: Value
    start: Value
    stop: Value
    entry: Value


def load_tokens(f: Function, row: HeadOfRow) -> TokenScratch:
    """Return the scratch of an item, with the keys and decays that the slot has."""
    facts = row.facts
    key_bytes, sums_bytes = facts.key_dim * 4, facts.group * facts.ring * 4
    scratch = TokenScratch(
        keys=f.stack(facts.ring * key_bytes),
        queries=f.stack(BLOCK * key_bytes),
        conv=f.stack(facts.taps * facts.width * 4),
        windows=f.stack((facts.taps - 1 + BLOCK) * 8),
        zeros=f.stack(facts.row_bytes),
        sums=f.stack(sums_bytes),
        decays=f.stack(facts.group * VECTOR.nbytes),
        betas=f.stack(facts.group * VECTOR.nbytes),
        keys_by_keys=f.stack(_MATRIX_BYTES),
        queries_by_keys=f.stack(_MATRIX_BYTES),
    )
    # Products with keys that aren't there yet are computed and not used: numbers that aren't normal would be slow
    clear_bytes(f, scratch.keys, facts.ring * key_bytes)
    clear_bytes(f, scratch.zeros, facts.row_bytes)
    for matrix in (scratch.keys_by_keys, scratch.queries_by_keys):
        clear_bytes(f, matrix, _MATRIX_BYTES)
    copy_bytes(f, scratch.sums, row.decays, sums_bytes)

    def copy(position: Value) -> None:
        entry = position % facts.ring * key_bytes
        copy_bytes(f, f.at(scratch.keys, entry), f.at(row.keys, entry), key_bytes)

    f.loop(row.begin, copy, start=row.folded)
    return scratch


def lay_out_conv(f: Function, row: HeadOfRow, scratch: TokenScratch, start: Value | int, stop: Value | int) -> None:
    """Store the weights of the channels from `start` to `stop` by tap."""
    facts = row.facts
    size = NUMBER_BYTES[facts.weights_dtype]
    own = f.at(row.operands.conv, row.head * (facts.width * facts.taps * size))

    def by_tap(vectors: list[Value]) -> list[Value]:
        """Return a vector for each tap, of vectors that have the taps of a channel side by side."""
        if len(vectors) == 1:
            return vectors
        pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
        halves = [by_tap([f.shuffle(a, b, range(i, 2 * LANES, 2)) for a, b in pairs]) for i in range(2)]
        return [one for both in zip(*halves, strict=True) for one in both]

    def lay_out(channel: Value) -> None:
        source = f.at(own, channel * (facts.taps * size))
        vectors = [load_numbers(f, f.at(source, i * LANES * size), facts.weights_dtype) for i in range(facts.taps)]
        for tap, vector in enumerate(by_tap(vectors)):
            f.store(vector, scratch.conv, channel * 4 + tap * facts.width * 4)

    f.loop(stop, lay_out, start=start, step=LANES)


def input_at(f: Function, row: HeadOfRow, scratch: TokenScratch, position: Value) -> Value:
    """Return where the input of the convolution of a token is; zeros before the sequence."""
    facts = row.facts
    kept = f.at(row.inputs, position % facts.recent * facts.row_bytes)
    before = f.at(row.tail(f, row.source), (position - row.folded + (facts.taps - 1)) * facts.row_bytes)
    old = f.select(position < row.folded, before, kept)
    pointer = f.select(position < row.begin, old, row.product(f, position))
    return f.select(position < 0, scratch.zeros, pointer)


def prepare_tokens(
    f: Function, row: HeadOfRow, scratch: TokenScratch, part: BlockPart, features: frozenset[str]
) -> None:
    """Compute all of the new tokens of a block that doesn't depend on values."""
    facts = row.facts
    first = part.at + part.start - (facts.taps - 1)

    def point(i: Value) -> None:
        f.store(input_at(f, row, scratch, first + i), scratch.windows, i * 8)

    f.loop(part.stop - part.start + (facts.taps - 1), point)
    for channel, rows, at in ((0, scratch.queries, part.start), (facts.key_dim, scratch.keys, part.entry + part.start)):
        to = f.at(rows, at * (facts.key_dim * 4))
        convolve(f, row, scratch, part, f.constant(I64, channel), to, facts.key_dim)
    for head in range(facts.group):
        _gate(f, row, scratch, part, head, features)

    def finish(i: Value) -> None:
        key, query = (
            f.at(rows, at * (facts.key_dim * 4)) for rows, at in ((scratch.keys, part.entry + i), (scratch.queries, i))
        )
        _normalize(f, query, facts.key_dim, facts.key_dim**-0.5)
        _normalize(f, key, facts.key_dim, 1.0)
        keys = f.at(scratch.keys, part.entry * (facts.key_dim * 4))
        # Keys of later tokens aren't needed
        halves = i // _HALF + 1
        f.loop(halves, lambda half: _multiply_keys(f, scratch, keys, key, query, i, half, facts.key_dim))

    f.loop(part.stop, finish, start=part.start)


def convolve(
    f: Function, row: HeadOfRow, scratch: TokenScratch, part: BlockPart, channel: Value, to: Value, channels: int
) -> None:
    """Store silu of the convolution for the new tokens of a block: rows of some channels from `channel` on, float32."""
    weights = f.at(scratch.conv, channel * 4)
    channel_bytes = channel * NUMBER_BYTES[row.facts.dtype]
    count = part.stop - part.start
    f.call(_convolution(row.facts, channels), None, scratch.windows, weights, channel_bytes, count, to)


def write_convolution(module: Module, facts: CpuDelta, channels: int, features: frozenset[str]) -> None:
    """Add the function that `convolve` calls: within the whole kernel, its constants would not be in registers."""
    f = module.function(_convolution(facts, channels), [PTR, PTR, I64, I64, PTR], public=True)
    windows, conv, channel_bytes, count, to = f.arguments

    def convolve_vector(channel: Value) -> None:
        weights = [f.load(VECTOR, conv, channel * 4 + tap * facts.width * 4) for tap in range(facts.taps)]
        offset = channel_bytes + channel * NUMBER_BYTES[facts.dtype]

        def load(i: Value) -> Value:
            return load_numbers(f, f.at(f.load(PTR, windows, i * 8), offset), facts.dtype)

        def token(i: Value, *before: Value) -> list[Value]:
            window = [*before, load(i + (facts.taps - 1))]
            total = window[0] * weights[0]
            for x, weight in zip(window[1:], weights[1:], strict=True):
                total = f.fma(x, weight, total)
            x = total * logistic.sigmoid(f, total, features)
            x = x if facts.dtype == "float32" else maths.from_bf16(f, to_bf16(f, x, features))
            f.store(x, to, (i * channels + channel) * 4)
            return window[1:]

        f.loop(count, token, *(load(f.constant(I64, i)) for i in range(facts.taps - 1)))

    f.loop(channels, convolve_vector, step=LANES)
    f.ret()


def _convolution(facts: CpuDelta, channels: int) -> str:
    return f"{facts.name}_convolution_{channels}"


def _gate(
    f: Function, row: HeadOfRow, scratch: TokenScratch, part: BlockPart, head: int, features: frozenset[str]
) -> None:
    """Store beta, the sum of the logarithms of the decays, and its exponential, for a value head of the group."""
    facts = row.facts
    size = NUMBER_BYTES[facts.gates_dtype]
    betas, steps = f.stack(VECTOR.nbytes), f.stack(VECTOR.nbytes)
    for raw in (betas, steps):
        f.store(f.constant(VECTOR, 0.0), raw)

    def load(i: Value) -> None:
        token = (row.first_token + part.at + i - row.begin) * row.operands.key_heads + row.head
        own = f.at(row.operands.gates, (token * (2 * facts.group) + head) * size)
        f.store(load_number(f, own, facts.gates_dtype), betas, i * 4)
        f.store(load_number(f, f.at(own, facts.group * size), facts.gates_dtype), steps, i * 4)

    f.loop(part.stop, load, start=part.start)
    f.store(logistic.sigmoid(f, f.load(VECTOR, betas), features), scratch.betas, head * VECTOR.nbytes)
    value_head = (row.head * facts.group + head) * 4
    rate, bias = (splat(f, of, value_head) for of in (row.operands.rate, row.operands.bias))
    decay = logistic.softplus(f, f.load(VECTOR, steps) + bias)
    f.store((0.0 - maths.exp(f, rate)) * decay, steps)
    sums = f.at(scratch.sums, (part.entry + head * facts.ring) * 4)
    before = f.load(F32, sums, f.maximum(part.start - 1, 0) * 4)
    before = f.select(part.start > 0, before, 0.0)

    def add(i: Value, total: Value) -> Value:
        total = total + f.load(F32, steps, i * 4)
        f.store(total, sums, i * 4)
        return total

    f.loop(part.stop, add, before, start=part.start)
    f.store(maths.exp(f, f.load(VECTOR, sums)), scratch.decays, head * VECTOR.nbytes)


def _normalize(f: Function, x: Value, dim: int, scale: float) -> None:
    """Divide a row by its norm, in place, and multiply it by `scale`."""
    vectors = [f.load(VECTOR, x, 4 * at) for at in range(0, dim, LANES)]
    total = vectors[0] * vectors[0]
    for vector in vectors[1:]:
        total = f.fma(vector, vector, total)
    square = f.first(maths.reduce_lanes(f, total, operator.add)) + _NORM_EPS
    factor = f.broadcast(f.constant(F32, scale) / f.call("llvm.sqrt.f32", F32, square), LANES)
    for i, vector in enumerate(vectors):
        f.store(vector * factor, x, i * VECTOR.nbytes)


def _multiply_keys(
    f: Function, scratch: TokenScratch, keys: Value, key: Value, query: Value, i: Value, half: Value, dim: int
) -> None:
    """Store the products of a token's key and query with half of the keys of its block."""

    keys = f.at(keys, half * (_HALF * dim * 4))

    def add(d: Value, *sums: Value) -> list[Value]:
        own = [f.load(VECTOR, some, d * 4) for some in (key, query)]
        others = [f.load(VECTOR, keys, (d + j * dim) * 4) for j in range(_HALF)]
        pairs = [(one, other) for one in own for other in others]
        return [f.fma(*pair, total) for pair, total in zip(pairs, sums, strict=True)]

    sums = maths.lane_sums(f, f.loop(dim, add, *[f.constant(VECTOR, 0.0)] * (2 * _HALF), step=LANES))
    for which, to in enumerate((scratch.keys_by_keys, scratch.queries_by_keys)):
        lanes = range(which * _HALF, (which + 1) * _HALF)
        f.store(f.shuffle(sums, sums, lanes), to, i * VECTOR.nbytes + half * (_HALF * 4))
