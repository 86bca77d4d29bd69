"""The step that decodes and prefill chunks of the CPU's kernel share: some rows of queries attend to a block of tokens.

Both add in the same order, so a token's output has the same bits whichever of them computes it. Blocks of 64 tokens
begin at multiples of 64, chunks of 512 at multiples of 512. The blocks of a chunk are added one after another to a
running softmax (Milakov, Gimelshein 2018), and whole chunks are merged in order. Tokens that a row doesn't see add
nothing, not even rounding.

A block of keys is laid out with tokens side by side, a block of values with its dimensions side by side, once for all
rows. Then both products are the same loop, whose sums stay in registers. If the CPU multiplies bfloat16, a word holds
two neighbours along the sum; otherwise everything is float32. Tile registers take blocks of such words as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from pallas_kernels.cpu import maths
from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.tile_registers import FEATURES, ROW_BYTES, ROWS, TileRegisters
from pallas_kernels.cpu.types import F32, I16, I32, I64
from pallas_kernels.paged_attention.cpu.tiles import (
    HALVES,
    LANES,
    MASKED,
    VECTOR,
    WORDS,
    CpuAttention,
    CpuHeads,
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
"""The most rows that are computed together without tile registers. AVX-512 has registers for their sums."""
LINE = 64
"""Bytes of a cache line."""
Prefetch = Callable[[Value, Value, int], None]
# The peak of a row that saw no token: below any logit, but far above masked ones, whose weights so become 0.
_UNSEEN = MASKED / 10
WIDE = 4
BLOCK = WIDE * LANES


class LaidOut(Protocol):
    """A block of tokens that is laid out, and memory for the logits and weights of the rows that attend to it.

    With `exact`, bfloat16 is multiplied without conversion: by `tiles`, if the CPU has tile registers. Vector registers
    hold `sums` vectors of sums.
    """

    @property
    def facts(self) -> CpuHeads: ...
    @property
    def keys(self) -> Value: ...
    @property
    def values(self) -> Value: ...
    @property
    def logits(self) -> Value: ...
    @property
    def weights(self) -> Value: ...
    @property
    def exact(self) -> bool: ...
    @property
    def tiles(self) -> TileRegisters | None: ...
    @property
    def sums(self) -> int: ...


class BlockScratch(NamedTuple):
    """One row of the batch and one KV head, and scratch memory for a block of it: see `LaidOut`.

    `offsets` are the offsets in the pool of the block's groups of 16 tokens. `sees_from` is the first position that any
    query sees.
    """

    shared: SharedOperands
    facts: CpuAttention
    row: Value
    head: Value
    sees_from: Value
    keys: Value
    values: Value
    logits: Value
    weights: Value
    offsets: Value
    exact: bool
    tiles: TileRegisters | None
    sums: int


def most_rows(facts: CpuHeads, features: frozenset[str]) -> int:
    """Return the most rows that are computed together."""
    return ROWS if has_tiles(facts, features) else STRIP


def make_scratch(
    f: Function,
    shared: SharedOperands,
    facts: CpuAttention,
    row: Value,
    head: Value,
    sees_from: Value,
    features: frozenset[str],
    rows: int,
) -> BlockScratch:
    """Allocate memory on the stack of `f` for a block; `rows` rows of queries are computed together.

    If the CPU has tile registers, set their shapes; the caller must release them.
    """
    exact = is_exact(facts, features)
    size = 2 if exact else 4
    keys, values = (f.stack(BLOCK * facts.head_dim * size) for _ in range(2))
    logits, weights = f.stack(rows * BLOCK * 4), f.stack(rows * BLOCK * size)
    offsets = f.stack(BLOCK // LANES * 8)
    tiles = TileRegisters(f, f.constant(I64, rows)) if has_tiles(facts, features) else None
    if tiles is not None:
        tiles.configure()
    sums = most_sums(features)
    return BlockScratch(shared, facts, row, head, sees_from, keys, values, logits, weights, offsets, exact, tiles, sums)


def most_sums(features: frozenset[str]) -> int:
    """Return the number of vectors of sums that registers hold."""
    return STRIP * WIDE if "avx512f" in features else STRIP


def is_exact(facts: CpuHeads, features: frozenset[str]) -> bool:
    """Return whether bfloat16 is multiplied without conversion."""
    return facts.dtype == facts.kv_dtype == "bfloat16" and "avx512bf16" in features


def has_tiles(facts: CpuHeads, features: frozenset[str]) -> bool:
    """Return whether tile registers multiply: heads must fill their rows."""
    return is_exact(facts, features) and facts.head_dim * 2 % ROW_BYTES == 0 and features >= FEATURES


def query_bytes(scratch: LaidOut) -> int:
    """Return the size of a row of queries in the form that products take."""
    return scratch.facts.head_dim * (2 if scratch.exact else 4)


def store_query(f: Function, scratch: LaidOut, source: Value | None, to: Value) -> None:
    """Store a row of queries in the form that products take; zeros if `source` is None."""
    facts = scratch.facts
    if source is not None and not scratch.exact:
        store_row(f, load_row(f, source, facts.dtype, facts.head_dim), to, "float32")
        return
    for at in range(0, query_bytes(scratch), 32):
        f.store(f.constant(HALVES, 0) if source is None else f.load(HALVES, source, at), to, at)


def state_bytes(facts: CpuHeads) -> int:
    """Return the size of a row's running softmax: its sums, its peak in every lane, and its total lane by lane."""
    return (facts.value_width + 2 * LANES) * 4


def reset_state(f: Function, state: Value, facts: CpuHeads) -> None:
    """Store the state of a row that has seen no token."""
    for i in range(facts.vectors):
        f.store(zero(f), state, 64 * i)
    f.store(f.constant(VECTOR, _UNSEEN), state, 4 * facts.value_width)
    f.store(zero(f), state, 4 * facts.value_width + 64)


def merge_state(f: Function, state: Value, later: Value, facts: CpuHeads) -> None:
    """Merge the state of a row's next chunk into its state."""
    peak_at, total_at = 4 * facts.value_width, 4 * facts.value_width + 64
    old, new = (f.load(VECTOR, pointer, peak_at) for pointer in (state, later))
    peak = f.maximum(old, new)
    keep, share = (maths.exp(f, x - peak) for x in (old, new))
    f.store(peak, state, peak_at)
    for at in (total_at, *range(0, peak_at, 64)):
        f.store(f.fma(f.load(VECTOR, later, at), share, f.load(VECTOR, state, at) * keep), state, at)


def write_output(f: Function, state: Value, sink: Value | None, out: Value, facts: CpuHeads) -> None:
    """Normalize a row's sums and store its output; a sink adds its exponential to the denominator."""
    peak, total = (f.load(VECTOR, state, 4 * facts.value_width + at) for at in (0, 64))
    total = maths.reduce_lanes(f, total, operator.add)
    share = f.constant(VECTOR, 1.0)
    if sink is not None:
        logit = f.broadcast(f.load(F32, sink), LANES)
        high = f.maximum(peak, logit)
        share = maths.exp(f, peak - high)
        total = f.fma(total, share, maths.exp(f, logit - high))
    share = share / total
    store_row(f, [f.load(VECTOR, state, 64 * i) * share for i in range(facts.vectors)], out, facts.dtype)


def find_tokens(f: Function, scratch: BlockScratch, at: Value, end: Value) -> None:
    """Find tokens `at` to `end` in the pool."""

    def group(i: Value) -> None:
        offset = token_offset(f, scratch.shared, scratch.facts, scratch.row, scratch.head, at + i * LANES)
        f.store(offset, scratch.offsets, i * 8)

    f.loop((end - at + (LANES - 1)) // LANES, group, start=first_seen(f, scratch, at) // LANES)


def prefetch_of(f: Function, facts: CpuAttention, ahead: Value, cache: int) -> Prefetch:
    """Return what `advance` calls for parts of the block whose groups of 16 tokens have the offsets `ahead`."""

    def prefetch(pool: Value, first: Value, nbytes: int) -> None:
        group_bytes = LANES * facts.kv_row_bytes
        offset = f.load(I64, ahead, first // group_bytes * 8) + first % group_bytes
        for line in range(0, nbytes, LINE):
            f.prefetch(f.at(pool, offset + line), cache)

    return prefetch


def lay_out_keys(f: Function, scratch: BlockScratch, at: Value, end: Value) -> None:
    """Lay out the keys of tokens `at` to `end` for the product with queries; call `find_tokens` before."""
    facts, shared = scratch.facts, scratch.shared

    def group(i: Value) -> None:
        keys = f.at(shared.keys, f.load(I64, scratch.offsets, i * 8))
        tokens = [f.at(keys, token * facts.kv_row_bytes) for token in range(LANES)]
        lay_out_group(f, tokens, f.at(scratch.keys, i * 64), facts, scratch.exact)

    f.loop((end - at + (LANES - 1)) // LANES, group, start=first_seen(f, scratch, at) // LANES)


def lay_out_values(f: Function, scratch: BlockScratch, at: Value, end: Value, prefetch: Prefetch | None = None) -> None:
    """Lay out the values of tokens `at` to `end` for the product with weights; call `find_tokens` before.

    See `advance` for `prefetch`.
    """
    facts, shared = scratch.facts, scratch.shared
    row_bytes = facts.value_width * 4

    def step(k: Value, masked: bool) -> Sequence[Value]:
        for i, column in enumerate(value_vectors(f, scratch, at, end, k, range(facts.vectors), masked)):
            f.store(column, scratch.values, k * row_bytes + 64 * i)
        if prefetch is not None:
            nbytes = 2 * facts.kv_row_bytes
            prefetch(shared.values, k * nbytes, nbytes)
        return ()

    def clear(k: Value) -> None:
        for i in range(facts.vectors):
            f.store(f.constant(WORDS, 0), scratch.values, k * row_bytes + 64 * i)

    each_step(f, scratch, at, end, step)
    if scratch.tiles is not None:  # which multiply all tokens of a block
        f.loop(first_seen(f, scratch, at) // 2, clear)
        f.loop(f.constant(I64, BLOCK // 2), clear, start=(end - at + 1) // 2)


def first_seen(f: Function, scratch: BlockScratch, at: Value) -> Value:
    """Return the index of the first token of a block that any query sees."""
    return f.constant(I64, 0) if scratch.facts.window is None else f.maximum(scratch.sees_from, at) - at


def each_step(
    f: Function, scratch: BlockScratch, at: Value, end: Value, body: Callable[..., Sequence[Value]], *carried: Value
) -> list[Value]:
    """Run `body(step, masked, *carried)` for each token of a block that any query sees.

    If bfloat16 is multiplied without conversion, a step is a pair of neighbours; of a `masked` pair, one may be unseen.
    """
    first, count = first_seen(f, scratch, at), end - at

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


def value_vectors(
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
    # Columns are taken in pairs if they can be: a pair fills a register of each token, and each takes one instruction
    at_once = 2 if len(columns) % 2 == 0 else 1
    kind = I16.times(LANES * at_once)
    seen = []
    for i in range(per_step):
        position = at + token + i
        mask = position < end
        if facts.window is not None:
            mask = mask & (position >= scratch.sees_from)
        seen.append(f.broadcast(mask, kind.lanes))
    for i in columns[::at_once]:
        pair = [f.load(kind, row, 32 * i) for row in rows]
        if masked:
            pair = [f.select(mask, half, 0) for mask, half in zip(seen, pair, strict=True)]
        for first in range(0, kind.lanes, LANES):
            places = range(first, first + LANES)
            yield f.shuffle(pair[0], pair[1], [place + side for place in places for side in (0, kind.lanes)])


def lay_out_group(f: Function, tokens: Sequence[Value], to: Value, facts: CpuHeads, exact: bool) -> None:
    """Transpose the keys of 16 tokens, so that the same word of each token is side by side."""
    words = facts.head_dim // 2 if exact else facts.head_dim
    for first in range(0, words, LANES):
        count = min(LANES, words - first)
        rows = []
        for pointer in tokens:
            if exact:
                some = f.load(I32.times(count), pointer, first * 4)
                rows.append(some if count == LANES else f.shuffle(some, some, [i % count for i in range(LANES)]))
            else:
                pointer = f.at(pointer, first * facts.kv_bytes)
                rows += load_row(f, pointer, facts.kv_dtype, LANES)
        for i, column in enumerate(maths.transpose(f, rows)[:count]):
            f.store(column, to, (first + i) * (BLOCK * 4))


def seen_logits(
    f: Function, products: list[Value], at: Value, query_position: Value, facts: CpuAttention
) -> list[Value]:
    """Return the logits of a block's tokens, of which a query sees some."""
    seen = []
    for i in range(WIDE):
        position = positions(f, at + i * LANES)
        mask = position <= splat(f, query_position)
        if facts.window is not None:
            mask = mask & (position > splat(f, query_position - facts.window))
        seen.append(mask)
    return [f.select(mask, capped(f, x, facts), MASKED) for mask, x in zip(seen, products, strict=True)]


def softmax_weights(f: Function, logits: list[Value], state: Value, facts: CpuHeads) -> tuple[Value, list[Value]]:
    """Update a row's peak and total; return the factor that rescales its sums, and the weights of a block's tokens."""
    old, total = (f.load(VECTOR, state, 4 * facts.value_width + at) for at in (0, 64))
    high = f.maximum(f.maximum(logits[0], logits[1]), f.maximum(logits[2], logits[3]))
    peak = f.maximum(old, maths.reduce_lanes(f, high, f.maximum))
    keep = maths.exp(f, old - peak)
    shares = [maths.exp(f, x - peak) for x in logits]
    total = f.fma(total, keep, (shares[0] + shares[1]) + (shares[2] + shares[3]))
    f.store(peak, state, 4 * facts.value_width)
    f.store(total, state, 4 * facts.value_width + 64)
    return keep, shares
