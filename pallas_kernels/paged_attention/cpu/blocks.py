"""The step that decodes and prefill chunks of the CPU's kernel share: some rows of queries attend to a block of tokens.

Both add in the same order, so a token's output has the same bits whichever of them computes it. Blocks of 64 tokens
begin at multiples of 64, chunks of 512 at multiples of 512. The blocks of a chunk are added one after another to a
running softmax (Milakov, Gimelshein 2018), and whole chunks are merged in order. Tokens that a row doesn't see add
nothing, not even rounding.

A block of keys is laid out with tokens side by side, a block of values with its dimensions side by side, once for all
rows. Then both products are the same loop, whose sums stay in registers. If the CPU multiplies bfloat16, a word holds
two neighbours along the sum; otherwise everything is float32.
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
    CpuAttention,
    SharedOperands,
    capped,
    load_row,
    positions,
    splat,
    store_row,
    token_offset,
    zero,
)

CHUNK = 512
"""Tokens that are summed separately, so that threads can share a long row."""
STRIP = 6
"""The most rows that are computed together. AVX-512 has registers for their sums."""
# The peak of a row that saw no token: below any logit, but far above masked ones, whose weights so become 0.
_UNSEEN = MASKED / 10
_WIDE = 4
BLOCK = _WIDE * LANES


class BlockScratch(NamedTuple):
    """One row of the batch and one KV head, and scratch memory for a block of it.

    `offsets` are the offsets in the pool of the block's groups of 16 tokens. `sees_from` is the first position that any
    query sees. With `exact`, bfloat16 is multiplied without conversion. Registers hold `sums` vectors of sums.
    """

    shared: SharedOperands
    facts: CpuAttention
    row: Value
    head: Value
    sees_from: Value
    keys: Value
    values: Value
    weights: Value
    offsets: Value
    exact: bool
    sums: int


def make_scratch(
    f: Function,
    shared: SharedOperands,
    facts: CpuAttention,
    row: Value,
    head: Value,
    sees_from: Value,
    features: frozenset[str],
) -> BlockScratch:
    """Allocate a block's memory on the stack of `f`."""
    exact = facts.dtype == facts.kv_dtype == "bfloat16" and "avx512bf16" in features
    size = 2 if exact else 4
    keys, values = (f.stack(BLOCK * facts.head_dim * size) for _ in range(2))
    weights, offsets = f.stack(STRIP * BLOCK * size), f.stack(BLOCK // LANES * 8)
    sums = STRIP * _WIDE if "avx512f" in features else STRIP
    return BlockScratch(shared, facts, row, head, sees_from, keys, values, weights, offsets, exact, sums)


def query_bytes(scratch: BlockScratch) -> int:
    """Return the size of a row of queries in the form that products take."""
    return scratch.facts.head_dim * (2 if scratch.exact else 4)


def store_query(f: Function, scratch: BlockScratch, source: Value | None, to: Value) -> None:
    """Store a row of queries in the form that products take; zeros if `source` is None."""
    facts = scratch.facts
    if source is not None and not scratch.exact:
        store_row(f, load_row(f, source, facts.dtype, facts.head_dim), to, "float32")
        return
    for at in range(0, query_bytes(scratch), 32):
        f.store(f.constant(HALVES, 0) if source is None else f.load(HALVES, source, at), to, at)


def state_bytes(facts: CpuAttention) -> int:
    """Return the size of a row's running softmax: its sums, its peak in every lane, and its total lane by lane."""
    return (facts.head_dim + 2 * LANES) * 4


def reset_state(f: Function, state: Value, facts: CpuAttention) -> None:
    """Store the state of a row that has seen no token."""
    for i in range(facts.vectors):
        f.store(zero(f), state, 64 * i)
    f.store(f.constant(VECTOR, _UNSEEN), state, 4 * facts.head_dim)
    f.store(zero(f), state, 4 * facts.head_dim + 64)


def merge_state(f: Function, state: Value, later: Value, facts: CpuAttention) -> None:
    """Merge the state of a row's next chunk into its state."""
    peak_at, total_at = 4 * facts.head_dim, 4 * facts.head_dim + 64
    old, new = (f.load(VECTOR, pointer, peak_at) for pointer in (state, later))
    peak = f.maximum(old, new)
    keep, share = (maths.exp(f, x - peak) for x in (old, new))
    f.store(peak, state, peak_at)
    for at in (total_at, *range(0, peak_at, 64)):
        f.store(f.fma(f.load(VECTOR, later, at), share, f.load(VECTOR, state, at) * keep), state, at)


def write_output(f: Function, state: Value, sink: Value, out: Value, facts: CpuAttention) -> None:
    """Normalize a row's sums and store its output; a sink adds its exponential to the denominator."""
    peak, total = (f.load(VECTOR, state, 4 * facts.head_dim + at) for at in (0, 64))
    total = maths.reduce_lanes(f, total, operator.add)
    share = f.constant(VECTOR, 1.0)
    if facts.sinks:
        logit = f.broadcast(f.load(F32, sink), LANES)
        high = f.maximum(peak, logit)
        share = maths.exp(f, peak - high)
        total = f.fma(total, share, maths.exp(f, logit - high))
    share = share / total
    store_row(f, [f.load(VECTOR, state, 64 * i) * share for i in range(facts.vectors)], out, facts.dtype)


def lay_out_keys(f: Function, scratch: BlockScratch, at: Value, end: Value) -> None:
    """Lay out the keys of tokens `at` to `end` for the product with queries."""
    facts, shared = scratch.facts, scratch.shared

    def group(i: Value) -> None:
        offset = token_offset(f, shared, facts, scratch.row, scratch.head, at + i * LANES)
        f.store(offset, scratch.offsets, i * 8)
        _lay_out_group(f, f.at(shared.keys, offset), f.at(scratch.keys, i * 64), facts, scratch.exact)

    f.loop((end - at + (LANES - 1)) // LANES, group, start=_first_seen(f, scratch, at) // LANES)


def lay_out_values(f: Function, scratch: BlockScratch, at: Value, end: Value) -> None:
    """Lay out their values for the product with weights; call `lay_out_keys` before."""

    def step(k: Value, masked: bool) -> Sequence[Value]:
        for i, column in enumerate(_values(f, scratch, at, end, k, range(scratch.facts.vectors), masked)):
            f.store(column, scratch.values, k * (scratch.facts.head_dim * 4) + 64 * i)
        return ()

    _each_step(f, scratch, at, end, step)


def _first_seen(f: Function, scratch: BlockScratch, at: Value) -> Value:
    """Return the index of the first token of a block that any query sees."""
    return f.constant(I64, 0) if scratch.facts.window is None else f.maximum(scratch.sees_from, at) - at


def _each_step(
    f: Function, scratch: BlockScratch, at: Value, end: Value, body: Callable[..., Sequence[Value]], *carried: Value
) -> list[Value]:
    """Run `body(step, masked, *carried)` for each token of a block that any query sees.

    If bfloat16 is multiplied without conversion, a step is a pair of neighbours; of a `masked` pair, one may be unseen.
    """
    first, count = _first_seen(f, scratch, at), end - at

    def run(start: Value, stop: Value, masked: bool, before: Sequence[Value]) -> list[Value]:
        return f.loop(stop, lambda k, *values: body(k, masked, *values), *before, start=start)

    if not scratch.exact:
        return run(first, count, False, carried)
    stop = (count + 1) // 2
    if scratch.facts.window is None:
        return run(count // 2, stop, True, run(first, count // 2, False, carried))
    whole = f.minimum((first + 1) // 2, stop)
    begun = run(first // 2, whole, True, carried)
    done = run(whole, count // 2, False, begun)
    return run(f.maximum(whole, count // 2), stop, True, done)


def _values(
    f: Function, scratch: BlockScratch, at: Value, end: Value, step: Value, columns: range, masked: bool
) -> Iterator[Value]:
    """Yield the vectors `columns` of a step's values. Values that no query sees may be NaN and become zeros."""
    facts, per_step = scratch.facts, 2 if scratch.exact else 1
    token = step * per_step
    offset = f.load(I64, scratch.offsets, token // LANES * 8) + token % LANES * facts.kv_row_bytes
    rows = [f.at(scratch.shared.values, offset + i * facts.kv_row_bytes) for i in range(per_step)]
    if not scratch.exact:
        for i in columns:
            yield from load_row(f, f.at(rows[0], i * LANES * facts.kv_bytes), facts.kv_dtype, LANES)
        return
    lanes = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
    seen = []
    for i in range(per_step):
        position = at + token + i
        mask = position < end
        if facts.window is not None:
            mask = mask & (position >= scratch.sees_from)
        seen.append(f.broadcast(mask, LANES))
    for i in columns:
        pair = [f.load(HALVES, row, 32 * i) for row in rows]
        if masked:
            pair = [f.select(mask, half, 0) for mask, half in zip(seen, pair, strict=True)]
        yield f.shuffle(pair[0], pair[1], lanes)


def _lay_out_group(f: Function, tokens: Value, to: Value, facts: CpuAttention, exact: bool) -> None:
    """Transpose 16 tokens: the same word of each token side by side."""
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
                rows += load_row(f, pointer, facts.kv_dtype, LANES)
        for i, column in enumerate(maths.transpose(f, rows)[:count]):
            f.store(column, to, (first + i) * (BLOCK * 4))


def advance(
    f: Function,
    scratch: BlockScratch,
    queries: Value,
    states: Value,
    query_positions: Sequence[Value],
    at: Value,
    end: Value,
    prefetch: Callable[[Value, Value, int], None] | None = None,
) -> None:
    """Add a block whose keys are laid out to the states of consecutive rows of queries at `query_positions`.

    Without `prefetch`, its values must be laid out too. With it, values are read from the pool, and each step of both
    products calls `prefetch(pool, first byte, bytes)` for its part of a block: a core has only some reads under way.
    """
    facts, exact = scratch.facts, scratch.exact
    size = 2 if exact else 4
    words = f.constant(I64, facts.head_dim * size // 4)
    together = max(1, min(_WIDE, scratch.sums // len(query_positions)))

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
    for first in range(0, _WIDE, together):
        columns = range(first, min(first + together, _WIDE))

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
        keep, shares = _softmax_weights(f, logits[r], state, at, position, facts)
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
            values = list(_values(f, scratch, at, end, k, columns, masked))
            return multiply(scratch.weights, BLOCK * size, k, values, sums)

        def laid_out(k: Value, *sums: Value, columns: range = columns) -> list[Value]:
            kind, row = WORDS if exact else VECTOR, k * (facts.head_dim * 4)
            values = [f.load(kind, scratch.values, row + 64 * i) for i in columns]
            return multiply(scratch.weights, BLOCK * size, k, values, sums)

        places = [f.at(states, r * state_bytes(facts) + 64 * i) for r in range(len(query_positions)) for i in columns]
        start = [f.load(VECTOR, place) * keeps[i // len(columns)] for i, place in enumerate(places)]
        if prefetch is not None:
            done = _each_step(f, scratch, at, end, in_pool, *start)
        else:
            begin, count = _first_seen(f, scratch, at), end - at
            if exact:
                begin, count = begin // 2, (count + 1) // 2
            done = f.loop(count, laid_out, *start, start=begin)
        for place, total in zip(places, done, strict=True):
            f.store(total, place)


def _softmax_weights(
    f: Function, logits: list[Value], state: Value, at: Value, query_position: Value, facts: CpuAttention
) -> tuple[Value, list[Value]]:
    """Update a row's peak and total; return the factor that rescales its sums, and the weights of a block's tokens."""
    seen = []
    for i in range(_WIDE):
        position = positions(f, at + i * LANES)
        mask = position <= splat(f, query_position)
        if facts.window is not None:
            mask = mask & (position > splat(f, query_position - facts.window))
        seen.append(mask)
    logits = [f.select(mask, capped(f, x, facts), MASKED) for mask, x in zip(seen, logits, strict=True)]
    old, total = (f.load(VECTOR, state, 4 * facts.head_dim + at) for at in (0, 64))
    high = f.maximum(f.maximum(logits[0], logits[1]), f.maximum(logits[2], logits[3]))
    peak = f.maximum(old, maths.reduce_lanes(f, high, f.maximum))
    keep = maths.exp(f, old - peak)
    shares = [maths.exp(f, x - peak) for x in logits]
    total = f.fma(total, keep, (shares[0] + shares[1]) + (shares[2] + shares[3]))
    f.store(peak, state, 4 * facts.head_dim)
    f.store(total, state, 4 * facts.head_dim + 64)
    return keep, shares
