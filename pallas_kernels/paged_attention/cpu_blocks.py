"""What decodes and prefill chunks of the CPU's kernel have in common: a few rows of queries, a block of tokens further.

Both add in the same order, so a token's numbers are the same bits whichever of them computes it: blocks of 64 tokens
begin at multiples of 64, chunks of 512 at multiples of 512. The blocks of a chunk are added one after the other under a
running maximum (Milakov, Gimelshein 2018), and whole chunks are merged in their order. What a row doesn't see adds
nothing, not even rounding.

A block of keys is laid out with tokens side by side, a block of values with its dimensions side by side, once for all
rows; then both products are the same loop, whose sums stay in registers. Where the CPU multiplies bfloat16, a word
holds two neighbours along the sum; else everything is float32.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pallas_kernels.cpu import maths
from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.types import F32, I32, I64
from pallas_kernels.paged_attention.cpu_tiles import (
    HALVES,
    LANES,
    MASKED,
    VECTOR,
    WORDS,
    Attention,
    Work,
    capped,
    load_row,
    positions,
    splat,
    store_row,
    token_offset,
    zero,
)

CHUNK = 512
"""Tokens whose sums are made apart, so that threads can share a long row."""
STRIP = 6
"""Rows that advance together at most: as many as registers have room for."""
_WIDE = 4
BLOCK = _WIDE * LANES


class Blocks(NamedTuple):
    """One row of the batch and one KV head, and memory for a block of it. `sees_from` is the first position that any
    of its queries sees; `exact` says that bfloat16 is multiplied as it is."""

    work: Work
    facts: Attention
    row: Value
    head: Value
    sees_from: Value
    keys: Value
    values: Value
    weights: Value
    exact: bool


def make_blocks(
    f: Function,
    work: Work,
    facts: Attention,
    row: Value,
    head: Value,
    sees_from: Value,
    features: frozenset[str],
) -> Blocks:
    """With memory on the stack of `f`."""
    exact = facts.dtype == facts.kv_dtype == "bfloat16" and "avx512bf16" in features
    size = 2 if exact else 4
    keys, values = (f.stack(BLOCK * facts.head_dim * size) for _ in range(2))
    return Blocks(work, facts, row, head, sees_from, keys, values, f.stack(STRIP * BLOCK * size), exact)


def query_bytes(blocks: Blocks) -> int:
    """Of a row of queries as products take it."""
    return blocks.facts.head_dim * (2 if blocks.exact else 4)


def put_query(f: Function, blocks: Blocks, come: Value | None, to: Value) -> None:
    """A row of queries as products take it; zeros where there is none."""
    facts = blocks.facts
    if come is not None and not blocks.exact:
        store_row(f, load_row(f, come, facts.dtype, facts.head_dim, paired=False), to, "float32", paired=False)
        return
    for at in range(0, query_bytes(blocks), 32):
        f.store(f.constant(HALVES, 0) if come is None else f.load(HALVES, come, at), to, at)


def state_bytes(facts: Attention) -> int:
    """Of what is known of a row: its sums, then in every lane its peak, then its total, lane by lane."""
    return (facts.head_dim + 2 * LANES) * 4


def clear_state(f: Function, state: Value, facts: Attention) -> None:
    """A row that has seen nothing."""
    for i in range(facts.vectors):
        f.store(zero(f), state, 64 * i)
    f.store(f.constant(VECTOR, MASKED), state, 4 * facts.head_dim)
    f.store(zero(f), state, 4 * facts.head_dim + 64)


def merge_state(f: Function, state: Value, later: Value, facts: Attention) -> None:
    """Adds to a row's state that of its next chunk."""
    peak_at, total_at = 4 * facts.head_dim, 4 * facts.head_dim + 64
    old, new = (f.load(VECTOR, pointer, peak_at) for pointer in (state, later))
    peak = f.most(old, new)
    keep, share = (maths.exp(f, x - peak) for x in (old, new))
    f.store(peak, state, peak_at)
    for at in (total_at, *range(0, peak_at, 64)):
        f.store(f.fma(f.load(VECTOR, later, at), share, f.load(VECTOR, state, at) * keep), state, at)


def finish(f: Function, state: Value, sink: Value, out: Value, facts: Attention) -> None:
    """Writes a row's output; a sink adds its exponential to the denominator."""
    peak, total = (f.load(VECTOR, state, 4 * facts.head_dim + at) for at in (0, 64))
    total = maths.everywhere(f, total, operator.add)
    share = f.constant(VECTOR, 1.0)
    if facts.sinks:
        logit = f.spread(f.load(F32, sink), LANES)
        high = f.most(peak, logit)
        share = maths.exp(f, peak - high)
        total = f.fma(total, share, maths.exp(f, logit - high))
    share = share / total
    store_row(f, [f.load(VECTOR, state, 64 * i) * share for i in range(facts.vectors)], out, facts.dtype, paired=False)


def lay_out(
    f: Function, blocks: Blocks, at: Value, end: Value, ask: Callable[[Value, Value, int], None] | None = None
) -> None:
    """The keys and values of a block as both products take them, tokens `at` to `end`. Values that no query sees are
    zeros, as they may be NaN. `ask(i, token, count)` is called beside the reading of tokens of group `i`."""
    facts, work, exact = blocks.facts, blocks.work, blocks.exact
    per_step = 2 if exact else 1

    def group(i: Value) -> None:
        position = at + i * LANES
        offset = token_offset(f, work, facts, blocks.row, blocks.head, position)
        _lay_out_keys(f, f.at(work.keys, offset), f.at(blocks.keys, i * 64), facts, exact)
        tokens = f.at(work.values, offset)
        to = f.at(blocks.values, i * (LANES * facts.head_dim * (2 if exact else 4)))

        def step(j: Value) -> None:
            own = []
            if ask is not None:
                ask(i, j * per_step, per_step)
            for token in range(per_step):
                t = j * per_step + token
                seen = (position + t < end) & (position + t >= blocks.sees_from)
                own.append((seen, f.at(tokens, t * facts.kv_row_bytes)))
            _lay_out_values(f, own, f.at(to, j * (facts.head_dim * 4)), facts, exact)

        f.loop((f.least(end - position, LANES) + (per_step - 1)) // per_step, step)

    first = (f.most(blocks.sees_from, at) - at) // LANES
    f.loop((end - at + (LANES - 1)) // LANES, group, start=first)


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
            f.store(column, to, (first + i) * (BLOCK * 4))


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


def advance(
    f: Function, blocks: Blocks, queries: Value, states: Value, asked: Sequence[Value], at: Value, end: Value
) -> None:
    """Rows of queries below each other, which ask from positions `asked`, over the block that is laid out."""
    facts, exact = blocks.facts, blocks.exact
    size = 2 if exact else 4
    words = f.constant(I64, facts.head_dim * size // 4)
    nothing = [[zero(f)] * _WIDE] * len(asked)
    none = f.constant(I64, 0)
    logits = _product(f, queries, facts.head_dim * size, blocks.keys, BLOCK * 4, none, words, nothing, exact)
    keeps = []
    for r, position in enumerate(asked):
        keep, shares = _weigh(f, logits[r], f.at(states, r * state_bytes(facts)), at, position, facts)
        keeps.append(keep)
        for i, share in enumerate(shares):
            if exact:
                f.store(f.to_bf16(share), blocks.weights, r * BLOCK * 2 + 32 * i)
            else:
                f.store(share, blocks.weights, r * BLOCK * 4 + 64 * i)
    first_step = f.most(blocks.sees_from, at) - at
    steps = end - at
    if exact:
        first_step, steps = first_step // 2, (steps + 1) // 2
    row_bytes = facts.head_dim * 4
    for first in range(0, facts.vectors, _WIDE):
        count = min(_WIDE, facts.vectors - first)
        sums = [
            [f.at(states, r * state_bytes(facts) + 64 * (first + i)) for i in range(count)] for r in range(len(asked))
        ]
        start = [[f.load(VECTOR, pointer) * keep for pointer in own] for own, keep in zip(sums, keeps, strict=True)]
        values = f.at(blocks.values, 64 * first)
        done = _product(f, blocks.weights, BLOCK * size, values, row_bytes, first_step, steps, start, exact)
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
    old, total = (f.load(VECTOR, state, 4 * facts.head_dim + at) for at in (0, 64))
    high = f.most(f.most(logits[0], logits[1]), f.most(logits[2], logits[3]))
    peak = f.most(old, maths.everywhere(f, high, f.most))
    keep = maths.exp(f, old - peak)
    # A chunk's first block may have nothing that a row sees, and then masked is the peak
    shares = [f.select(mask, maths.exp(f, x - peak), 0.0) for mask, x in zip(seen, logits, strict=True)]
    total = f.fma(total, keep, (shares[0] + shares[1]) + (shares[2] + shares[3]))
    f.store(peak, state, 4 * facts.head_dim)
    f.store(total, state, 4 * facts.head_dim + 64)
    return keep, shares


def _product(
    f: Function,
    left: Value,
    left_stride: int,
    right: Value,
    right_stride: int,
    first: Value,
    steps: Value,
    start: list[list[Value]],
    exact: bool,
) -> list[list[Value]]:
    """`start` and the products of rows of words, each in every lane, with registers of words."""
    count = len(start[0])

    def step(k: Value, *sums: Value) -> list[Value]:
        columns = [f.load(WORDS if exact else VECTOR, right, k * right_stride + 64 * i) for i in range(count)]
        out = []
        for r in range(len(start)):
            word = f.spread(f.load(I32 if exact else F32, left, k * 4 + r * left_stride), LANES)
            for column, total in zip(columns, sums[r * count :], strict=False):
                out.append(f.dot_bf16(column, word, total) if exact else f.fma(column, word, total))
        return out

    done = f.loop(steps, step, *(x for row in start for x in row), start=first)
    return [done[r * count : (r + 1) * count] for r in range(len(start))]
