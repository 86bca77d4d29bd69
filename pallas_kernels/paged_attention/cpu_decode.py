"""Decodes on a CPU: one item is the queries of one row, of one KV head or all, over a chunk of its tokens.

The query heads of a KV head share every key and value that is read. Chunks are so many tokens of a row, whatever else
there is in the batch; whoever finishes the last chunk of a row's head puts them together, in order. So sums depend on
the row alone, and one long row keeps every core busy.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

from pallas_kernels.cpu import maths
from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.types import BF16, F32, I64
from pallas_kernels.paged_attention.cpu_tiles import (
    HALVES,
    LANES,
    MASKED,
    TASK_BYTES,
    VECTOR,
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

CHUNK = 512
"""Tokens of an item."""
_BLOCK = 64
_LINE = 64
_GROUPS = _BLOCK // LANES
_MAX_HEADS, _MAX_SUMS = 6, 24


def partial_bytes(facts: Attention) -> int:
    """What an item leaves: for each query head its sums, then the peak and the total in every lane."""
    return facts.group * _head_bytes(facts)


def num_chunks(f: Function, facts: Attention, length: Value) -> Value:
    """Items of a row's KV head."""
    return (length - _first(f, facts, length) + (CHUNK - 1)) // CHUNK


def write_chunks(f: Function, facts: Attention, tasks: Value, count: Value, row: Value, length: Value) -> Value:
    """Lists a row's chunks after the first `count` ones, and says how many there are then."""
    chunks = num_chunks(f, facts, length)

    def one(chunk: Value) -> None:
        task = f.at(tasks, (count + chunk) * TASK_BYTES)
        for i, value in enumerate((row, chunk, count, chunks)):
            f.store(value, task, 8 * i)

    f.loop(chunks, one)
    return count + chunks


class _Block(NamedTuple):
    """Tokens `at` to `stop`, in groups of 16. `offsets` are where the groups lie in the pool; `ahead`, where those lie
    that are read next."""

    at: Value
    stop: Value
    offsets: Value
    ahead: Value

    def num_groups(self, f: Function) -> Value:
        """Up to `_GROUPS`."""
        return (self.stop - self.at + (LANES - 1)) // LANES


def decode(f: Function, item: Value, work: Work, facts: Attention, features: frozenset[str]) -> None:
    """Item `item` of tasks times shares of the KV heads."""
    index, share = item // work.head_shares, item % work.head_shares
    per_share = work.kv_heads // work.head_shares
    task = f.at(work.tasks, index * TASK_BYTES)
    row, chunk, first_task, chunks = (f.load(I64, task, 8 * i) for i in range(4))
    length = int_at(f, work.kv_lens, row)
    begin = _first(f, facts, length) + chunk * CHUNK
    end = f.least(begin + CHUNK, length)
    logits, offsets, ahead = (f.stack(size) for size in (facts.group * _BLOCK * 4, _GROUPS * 8, _GROUPS * 8))
    first_head = share * per_share
    last_head = first_head + per_share

    def one(head: Value) -> None:
        partial = f.at(work.partials, (index * work.kv_heads + head) * partial_bytes(facts))
        query = f.at(work.q, (row * work.kv_heads + head) * (facts.group * facts.head_dim * facts.q_bytes))
        _start(f, partial, facts)

        def advance(at: Value) -> None:
            later = at + _BLOCK < end
            next_head = f.select(later, head, head + 1)
            next_at = f.select(later, at + _BLOCK, begin)
            next_end = f.select(next_head < last_head, end, f.constant(I64, 0))
            block = _Block(at, f.least(at + _BLOCK, end), offsets, ahead)

            def group(i: Value) -> None:
                position, later = at + i * LANES, next_at + i * LANES
                offset = token_offset(f, work, facts, row, head, position)
                f.store(offset, offsets, i * 8)
                f.store(offset, ahead, i * 8)

                def aim() -> None:
                    f.store(token_offset(f, work, facts, row, next_head, later), ahead, i * 8)

                f.when(later < next_end, aim)
                _logits(f, f.at(work.keys, offset), query, f.at(logits, i * 64), position, length, facts, features)

            def fetch(i: Value) -> None:
                _fetch(f, work, row, next_head, next_at + i * LANES, next_end, facts)

            groups = block.num_groups(f)
            f.loop(groups, group)
            f.loop(_GROUPS, fetch, start=groups)
            _weigh(f, logits, groups, partial, facts)
            _mix(f, work, block, logits, partial, length, facts)

        f.loop(end, advance, start=begin, step=_BLOCK)
        counter = f.at(work.counters, (first_task * work.kv_heads + head) * 8)

        def finish() -> None:
            first = f.at(work.partials, (first_task * work.kv_heads + head) * partial_bytes(facts))
            sinks = f.at(work.sinks, head * (facts.group * 4))
            out = f.at(work.out, (row * work.kv_heads + head) * (facts.group * facts.head_dim * facts.q_bytes))
            _combine(f, first, work.kv_heads * partial_bytes(facts), chunks, sinks, out, facts)

        f.when((f.fetch_add(counter, 1) + 1).same(chunks), finish)

    for i in range(_GROUPS):
        _fetch(f, work, row, first_head, begin + i * LANES, end, facts)
    f.loop(last_head, one, start=first_head)


def _fetch(f: Function, work: Work, row: Value, head: Value, position: Value, end: Value, facts: Attention) -> None:
    """Has memory bring 16 tokens that will be read soon: pages are too short for a CPU to guess the next one."""

    def fetch() -> None:
        offset = token_offset(f, work, facts, row, head, position)
        f.loop(LANES, lambda i: _fetch_token(f, work, offset + i * facts.kv_row_bytes, facts))

    f.when(position < end, fetch)


def _fetch_token(f: Function, work: Work, offset: Value, facts: Attention) -> None:
    for pool in (work.keys, work.values):
        token = f.at(pool, offset)
        for line in range(0, facts.kv_row_bytes, _LINE):
            f.prefetch(f.at(token, line))


def _head_bytes(facts: Attention) -> int:
    return (facts.head_dim + 2 * LANES) * 4


def _first(f: Function, facts: Attention, length: Value) -> Value:
    """The first position that is looked at: where the window begins, or up to a group before."""
    if facts.window is None:
        return f.constant(I64, 0)
    return f.most(length - facts.window, 0) & -LANES


def _start(f: Function, partial: Value, facts: Attention) -> None:
    def head(g: Value) -> None:
        state = f.at(partial, g * _head_bytes(facts))
        for i in range(facts.vectors):
            f.store(zero(f), state, 64 * i)
        f.store(f.constant(VECTOR, MASKED), state, 4 * facts.head_dim)
        f.store(zero(f), state, 4 * facts.head_dim + 64)

    f.loop(facts.group, head)


def _logits(
    f: Function,
    keys: Value,
    query: Value,
    out: Value,
    position: Value,
    length: Value,
    facts: Attention,
    features: frozenset[str],
) -> None:
    """Those of 16 tokens in a page, for each query head."""
    at = positions(f, position)
    seen = at < splat(f, length)
    if facts.window is not None:
        seen = seen & (at >= splat(f, length - facts.window))
    exact = facts.dtype == facts.kv_dtype == "bfloat16" and "avx512bf16" in features

    def head(g: Value) -> None:
        own = f.at(query, g * (facts.head_dim * facts.q_bytes))
        load = _bf16_row if exact else load_row
        q = load(f, own, facts.dtype, facts.head_dim, paired=facts.paired)
        products = []
        for token in range(LANES):
            key = load(f, f.at(keys, token * facts.kv_row_bytes), facts.kv_dtype, facts.head_dim, paired=facts.paired)
            total = zero(f)
            for left, right in zip(q, key, strict=True):
                total = f.dot_bf16(left, right, total) if exact else f.fma(left, right, total)
            products.append(total)
        logits = capped(f, maths.sums(f, products), facts)
        f.store(f.select(seen, logits, MASKED), out, g * (_BLOCK * 4))

    f.loop(facts.group, head)


def _bf16_row(f: Function, pointer: Value, dtype: str, count: int, *, paired: bool) -> list[Value]:
    """As the CPU multiplies them; beyond the last one there are zeros."""
    out = [f.load(BF16.times(32), pointer, 64 * i) for i in range(count // 32)]
    if count % 32:
        last = f.load(BF16.times(16), pointer, 64 * len(out))
        out.append(f.shuffle(last, f.convert("bitcast", f.constant(HALVES, 0), last.type), range(32)))
    return out


def _weigh(f: Function, logits: Value, groups: Value, partial: Value, facts: Attention) -> None:
    """A block further: logits become weights, and what was summed under the old peak is rescaled."""

    def head(g: Value) -> None:
        own = f.at(logits, g * (_BLOCK * 4))
        state = f.at(partial, g * _head_bytes(facts))
        old = f.load(VECTOR, state, 4 * facts.head_dim)
        (high,) = f.loop(groups, lambda i, peak: f.most(peak, f.load(VECTOR, own, i * 64)), old)
        peak = maths.everywhere(f, high, f.most)

        def weigh(i: Value, total: Value) -> Value:
            weights = maths.exp(f, f.load(VECTOR, own, i * 64) - peak)
            f.store(weights, own, i * 64)
            return total + weights

        keep = maths.exp(f, old - peak)
        (total,) = f.loop(groups, weigh, f.load(VECTOR, state, 4 * facts.head_dim + 64) * keep)
        f.store(peak, state, 4 * facts.head_dim)
        f.store(total, state, 4 * facts.head_dim + 64)
        for i in range(facts.vectors):
            f.store(f.load(VECTOR, state, 64 * i) * keep, state, 64 * i)

    f.loop(facts.group, head)


def _mix(
    f: Function, work: Work, block: _Block, weights: Value, partial: Value, length: Value, facts: Attention
) -> None:
    """Adds a block's values, as many sums at a time as registers hold. Only those that are seen are read; what is read
    next is asked for one token at a time, as many requests at once would have to wait."""
    begin = block.at if facts.window is None else f.most(length - facts.window, block.at)
    for first_head, heads in _shares(facts.group, _MAX_HEADS):
        for first, count in _shares(facts.vectors, _MAX_SUMS // heads, 2):
            sums = [
                f.at(partial, (first_head + g) * _head_bytes(facts) + 64 * (first + i))
                for g in range(heads)
                for i in range(count)
            ]
            own, some = f.at(weights, first_head * (_BLOCK * 4)), f.at(work.values, first * LANES * facts.kv_bytes)
            ask = first_head == first == 0
            start = [f.load(VECTOR, pointer) for pointer in sums]
            for pointer, value in zip(
                sums, _add(f, work, some, block, own, begin, start, heads, ask, facts), strict=True
            ):
                f.store(value, pointer)


def _add(
    f: Function,
    work: Work,
    values: Value,
    block: _Block,
    weights: Value,
    begin: Value,
    start: list[Value],
    heads: int,
    ask: bool,
    facts: Attention,
) -> list[Value]:
    """`start`, all registers of one head after those of another, and a block's tokens from `begin` on."""
    count = len(start) // heads

    def group(i: Value, *sums: Value) -> list[Value]:
        tokens, ahead = f.at(values, f.load(I64, block.offsets, i * 8)), f.load(I64, block.ahead, i * 8)
        first = block.at + i * LANES

        def token(position: Value, *sums: Value) -> list[Value]:
            place = (position - first) * facts.kv_row_bytes
            if ask:
                _fetch_token(f, work, ahead + place, facts)
            row = load_row(f, f.at(tokens, place), facts.kv_dtype, count * LANES, paired=facts.paired)
            own = f.at(weights, (position - block.at) * 4)
            shares = [f.spread(f.load(F32, own, g * _BLOCK * 4), LANES) for g in range(heads)]
            return [f.fma(shares[i // count], row[i % count], total) for i, total in enumerate(sums)]

        return f.loop(f.least(first + LANES, block.stop), token, *sums, start=f.most(first, begin))

    return f.loop(block.num_groups(f), group, *start)


def _shares(count: int, most: int, step: int = 1) -> list[tuple[int, int]]:
    """About equal parts of at most `most`, each (first, number), all but the last multiples of `step`."""
    most = max(step, most // step * step)
    parts = -(-count // most)
    size = -(-count // parts)
    size += -size % step
    return [(first, min(size, count - first)) for first in range(0, count, size)]


def _combine(
    f: Function, partial: Value, stride: Value, chunks: Value, sinks: Value, out: Value, facts: Attention
) -> None:
    """A row's output of its chunks' sums; a sink adds its exponential to the denominator."""

    def head(g: Value) -> None:
        first = f.at(partial, g * _head_bytes(facts))
        peak = f.constant(VECTOR, MASKED)
        if facts.sinks:
            sink = f.spread(f.load(F32, sinks, g * 4), LANES)
            peak = sink
        peak_at, total_at = 4 * facts.head_dim, 4 * facts.head_dim + 64
        (peak,) = f.loop(chunks, lambda i, peak: f.most(peak, f.load(VECTOR, f.at(first, i * stride), peak_at)), peak)

        def add(i: Value, total: Value, *sums: Value) -> list[Value]:
            one = f.at(first, i * stride)
            keep = maths.exp(f, f.load(VECTOR, one, peak_at) - peak)
            total = f.fma(f.load(VECTOR, one, total_at), keep, total)
            return [total, *(f.fma(f.load(VECTOR, one, 64 * j), keep, x) for j, x in enumerate(sums))]

        total, *sums = f.loop(chunks, add, *(zero(f) for _ in range(facts.vectors + 1)))
        total = maths.everywhere(f, total, operator.add)
        if facts.sinks:
            total = total + maths.exp(f, sink - peak)
        share = f.constant(VECTOR, 1.0) / total
        at = f.at(out, g * (facts.head_dim * facts.q_bytes))
        store_row(f, [x * share for x in sums], at, facts.dtype, paired=facts.paired)

    f.loop(facts.group, head)
