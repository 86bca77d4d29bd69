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
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pallas_kernels.cpu import maths
from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.types import F32, I32, I64
from pallas_kernels.paged_attention.cpu.tiles import (
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
# The peak of nothing: lower than any logit, and so far above a masked one that this has no weight.
_UNSEEN = MASKED / 10
_WIDE = 4
BLOCK = _WIDE * LANES


class Blocks(NamedTuple):
    """One row of the batch and one KV head, and memory for a block of it: `offsets` are where its groups of 16 tokens
    stand in the pool. `sees_from` is the first position that any of its queries sees; `exact` says that bfloat16 is
    multiplied as it is."""

    work: Work
    facts: Attention
    row: Value
    head: Value
    sees_from: Value
    keys: Value
    values: Value
    weights: Value
    offsets: Value
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
    return Blocks(
        work,
        facts,
        row,
        head,
        sees_from,
        keys,
        values,
        f.stack(STRIP * BLOCK * size),
        f.stack(BLOCK // LANES * 8),
        exact,
    )


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
    f.store(f.constant(VECTOR, _UNSEEN), state, 4 * facts.head_dim)
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


def lay_out_keys(f: Function, blocks: Blocks, at: Value, end: Value) -> None:
    """The keys of tokens `at` to `end` as the product with queries takes them."""
    facts, work = blocks.facts, blocks.work

    def group(i: Value) -> None:
        offset = token_offset(f, work, facts, blocks.row, blocks.head, at + i * LANES)
        f.store(offset, blocks.offsets, i * 8)
        _lay_out_group(f, f.at(work.keys, offset), f.at(blocks.keys, i * 64), facts, blocks.exact)

    f.loop((end - at + (LANES - 1)) // LANES, group, start=_first_seen(f, blocks, at) // LANES)


def lay_out_values(f: Function, blocks: Blocks, at: Value, end: Value) -> None:
    """Their values as the product with weights takes them; after `lay_out_keys`."""

    def step(k: Value, masked: bool) -> Sequence[Value]:
        for i, column in enumerate(_values(f, blocks, at, end, k, range(blocks.facts.vectors), masked)):
            f.store(column, blocks.values, k * (blocks.facts.head_dim * 4) + 64 * i)
        return ()

    _each_step(f, blocks, at, end, step)


def _first_seen(f: Function, blocks: Blocks, at: Value) -> Value:
    """The first token of a block that any query sees."""
    return f.constant(I64, 0) if blocks.facts.window is None else f.most(blocks.sees_from, at) - at


def _each_step(
    f: Function,
    blocks: Blocks,
    at: Value,
    end: Value,
    body: Callable[..., Sequence[Value]],
    *carried: Value,
) -> list[Value]:
    """`body(step, masked, *carried)` for each token of a block that is seen, or for each pair of neighbours where
    bfloat16 is multiplied as it is; of a pair that is `masked` only one may be seen."""
    first, count = _first_seen(f, blocks, at), end - at

    def run(start: Value, stop: Value, masked: bool, before: Sequence[Value]) -> list[Value]:
        return f.loop(stop, lambda k, *values: body(k, masked, *values), *before, start=start)

    if not blocks.exact:
        return run(first, count, False, carried)
    stop = (count + 1) // 2
    if blocks.facts.window is None:
        return run(count // 2, stop, True, run(first, count // 2, False, carried))
    whole = f.least((first + 1) // 2, stop)
    begun = run(first // 2, whole, True, carried)
    done = run(whole, count // 2, False, begun)
    return run(f.most(whole, count // 2), stop, True, done)


def _values(
    f: Function, blocks: Blocks, at: Value, end: Value, step: Value, columns: range, masked: bool
) -> Iterator[Value]:
    """The values of a step, some registers of them. Those that no query sees are zeros, as they may be NaN."""
    facts, per_step = blocks.facts, 2 if blocks.exact else 1
    token = step * per_step
    offset = f.load(I64, blocks.offsets, token // LANES * 8) + token % LANES * facts.kv_row_bytes
    rows = [f.at(blocks.work.values, offset + i * facts.kv_row_bytes) for i in range(per_step)]
    if not blocks.exact:
        for i in columns:
            yield from load_row(f, f.at(rows[0], i * LANES * facts.kv_bytes), facts.kv_dtype, LANES, paired=False)
        return
    lanes = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
    seen = []
    for i in range(per_step):
        position = at + token + i
        mask = position < end
        if facts.window is not None:
            mask = mask & (position >= blocks.sees_from)
        seen.append(f.spread(mask, LANES))
    for i in columns:
        pair = [f.load(HALVES, row, 32 * i) for row in rows]
        if masked:
            pair = [f.select(mask, half, 0) for mask, half in zip(seen, pair, strict=True)]
        yield f.shuffle(pair[0], pair[1], lanes)


def _lay_out_group(f: Function, tokens: Value, to: Value, facts: Attention, exact: bool) -> None:
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


def advance(
    f: Function,
    blocks: Blocks,
    queries: Value,
    states: Value,
    asked: Sequence[Value],
    at: Value,
    end: Value,
    ask: Callable[[Value, int], None] | None = None,
) -> None:
    """Rows of queries below each other, which ask from positions `asked`, over a block whose keys are laid out.

    Its values must be so too, but with `ask`: then they are read where they are, and `ask(token, count)` is called
    beside each.
    """
    facts, exact = blocks.facts, blocks.exact
    size = 2 if exact else 4
    words = f.constant(I64, facts.head_dim * size // 4)
    nothing = [zero(f)] * (_WIDE * len(asked))

    def keys(k: Value) -> list[Value]:
        return [f.load(WORDS if exact else VECTOR, blocks.keys, k * (BLOCK * 4) + 64 * i) for i in range(_WIDE)]

    def multiply(left: Value, stride: int, k: Value, columns: Sequence[Value], sums: Sequence[Value]) -> list[Value]:
        """Adds the products of a word of each row, in every lane, with registers of words."""
        out = []
        for r in range(len(asked)):
            word = f.spread(f.load(I32 if exact else F32, left, k * 4 + r * stride), LANES)
            for column, total in zip(columns, sums[r * len(columns) :], strict=False):
                out.append(f.dot_bf16(column, word, total) if exact else f.fma(column, word, total))
        return out

    stride = query_bytes(blocks)
    logits = f.loop(words, lambda k, *sums: multiply(queries, stride, k, keys(k), sums), *nothing)
    keeps = []
    for r, position in enumerate(asked):
        state = f.at(states, r * state_bytes(facts))
        keep, shares = _weigh(f, logits[r * _WIDE : (r + 1) * _WIDE], state, at, position, facts)
        keeps.append(keep)
        for i, share in enumerate(shares):
            if exact:
                f.store(f.to_bf16(share), blocks.weights, r * BLOCK * 2 + 32 * i)
            else:
                f.store(share, blocks.weights, r * BLOCK * 4 + 64 * i)
    for first in range(0, facts.vectors, _WIDE):
        columns = range(first, min(first + _WIDE, facts.vectors))

        def in_pool(k: Value, masked: bool, *sums: Value, columns: range = columns) -> list[Value]:
            if columns.start == 0 and ask is not None:
                ask(k * (2 if exact else 1), 2 if exact else 1)
            values = list(_values(f, blocks, at, end, k, columns, masked))
            return multiply(blocks.weights, BLOCK * size, k, values, sums)

        def laid_out(k: Value, *sums: Value, columns: range = columns) -> list[Value]:
            kind, row = WORDS if exact else VECTOR, k * (facts.head_dim * 4)
            values = [f.load(kind, blocks.values, row + 64 * i) for i in columns]
            return multiply(blocks.weights, BLOCK * size, k, values, sums)

        places = [f.at(states, r * state_bytes(facts) + 64 * i) for r in range(len(asked)) for i in columns]
        start = [f.load(VECTOR, place) * keeps[i // len(columns)] for i, place in enumerate(places)]
        if ask is not None:
            done = _each_step(f, blocks, at, end, in_pool, *start)
        else:
            begin, count = _first_seen(f, blocks, at), end - at
            if exact:
                begin, count = begin // 2, (count + 1) // 2
            done = f.loop(count, laid_out, *start, start=begin)
        for place, total in zip(places, done, strict=True):
            f.store(total, place)


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
    shares = [maths.exp(f, x - peak) for x in logits]
    total = f.fma(total, keep, (shares[0] + shares[1]) + (shares[2] + shares[3]))
    f.store(peak, state, 4 * facts.head_dim)
    f.store(total, state, 4 * facts.head_dim + 64)
    return keep, shares
