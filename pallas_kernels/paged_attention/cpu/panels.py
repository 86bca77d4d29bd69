"""How a block of latent rows is added to the running softmax of a panel: 16 rows of queries side by side.

A row of queries is one head of one token. All of them share the rows of the pool, of which each is a key and begins
with its value. So a block is laid out once, for both products of all panels: as float32, or with neighbouring tokens
side by side if the CPU multiplies bfloat16. Keys are not transposed: each word is multiplied with that of 16 queries,
and instead of keys the products are transposed, which are fewer. Sums are over the words of a row, or over the tokens
of a block, in order, so it doesn't matter in which panel a row of queries is.
"""

from __future__ import annotations

from collections.abc import Iterator

from pallas_kernels.cpu import maths
from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.tile_registers import ROW_BYTES, TILE_BYTES
from pallas_kernels.cpu.types import F32, I32, I64
from pallas_kernels.paged_attention.cpu.advance import Strip, advance_tiles, multiply_keys_in_pool
from pallas_kernels.paged_attention.cpu.blocks import (
    BLOCK,
    STRIP,
    WIDE,
    BlockScratch,
    each_step,
    find_tokens,
    first_seen,
    lay_out_values,
    prefetch_of,
    query_bytes,
    softmax_weights,
    state_bytes,
    store_query,
)
from pallas_kernels.paged_attention.cpu.tiles import LANES, VECTOR, WORDS, load_row, zero

PANEL = LANES
"""Rows of queries of a panel."""
# A block is larger than a first cache.
_CACHE = 2


def panel_bytes(scratch: BlockScratch) -> int:
    """Return the size of a panel: each word of a row is a vector. Words beyond the row fill the last 16."""
    return -(-query_bytes(scratch) // ROW_BYTES) * TILE_BYTES


def store_panel(f: Function, scratch: BlockScratch, source: Value, live: Value, to: Value) -> None:
    """Store the first `live` rows of queries at `source` side by side, with zeros in place of other rows."""
    facts = scratch.facts
    stride = panel_bytes(scratch) // PANEL
    rows = f.stack(PANEL * stride)

    def row(r: Value) -> None:
        own, place = f.at(source, r * (facts.head_dim * facts.q_bytes)), f.at(rows, r * stride)
        f.when(r < live, lambda: store_query(f, scratch, own, place), lambda: store_query(f, scratch, None, place))

    def words(k: Value) -> None:
        own = [f.load(WORDS, rows, k * ROW_BYTES + r * stride) for r in range(PANEL)]
        for i, column in enumerate(maths.transpose(f, own)):
            f.store(column, to, k * TILE_BYTES + i * ROW_BYTES)

    f.loop(PANEL, row)
    f.loop(stride // ROW_BYTES, words)


def lay_out_block(f: Function, scratch: BlockScratch, at: Value, end: Value) -> None:
    """Lay out latent rows `at` to `end` for `advance_panel`."""
    facts = scratch.facts
    find_tokens(f, scratch, at, end)
    if scratch.exact:
        lay_out_values(f, scratch, at, end)
        return

    def token(t: Value, _: bool) -> tuple[()]:
        offset = f.load(I64, scratch.offsets, t // LANES * 8) + t % LANES * facts.kv_row_bytes
        row = f.at(scratch.shared.keys, offset)
        for i in range(facts.head_dim // LANES):
            (some,) = load_row(f, f.at(row, i * LANES * facts.kv_bytes), facts.kv_dtype, LANES)
            f.store(some, scratch.values, t * (facts.head_dim * 4) + 64 * i)
        return ()

    each_step(f, scratch, at, end, token)


def advance_panel(f: Function, scratch: BlockScratch, panel: Strip, at: Value, end: Value, ahead: Value) -> None:
    """Add a block that is laid out to the states of a panel.

    Each step of the product with keys prefetches its part of the next block, whose groups have the offsets `ahead`.
    """
    if scratch.tiles is not None:
        prefetch = prefetch_of(f, scratch.facts, ahead, _CACHE)
        multiply_keys_in_pool(f, scratch, scratch.tiles, panel.queries, PANEL, at, end, prefetch)
        advance_tiles(f, scratch, scratch.tiles, panel)
        return
    facts = scratch.facts
    _multiply_rows(f, scratch, panel.queries, at, end, ahead)
    keeps = f.stack(PANEL * 64)

    def weigh(r: Value) -> None:
        logits = [f.load(VECTOR, scratch.logits, r * (BLOCK * 4) + 64 * i) for i in range(WIDE)]
        state = f.at(panel.states, r * state_bytes(facts))
        keep, shares = softmax_weights(f, panel.logits_of(r, logits), state, facts)
        f.store(keep, keeps, r * 64)
        for i, share in enumerate(shares):
            if scratch.exact:
                f.store(f.to_bf16(share), scratch.weights, r * (BLOCK * 2) + 32 * i)
            else:
                f.store(share, scratch.weights, r * (BLOCK * 4) + 64 * i)

    f.loop(PANEL, weigh)
    _multiply_values(f, scratch, panel.states, keeps, at, end)


def _multiply_rows(f: Function, scratch: BlockScratch, queries: Value, at: Value, end: Value, ahead: Value) -> None:
    """Store as logits the products of a panel with the rows of a block."""
    facts, exact = scratch.facts, scratch.exact
    products = f.stack(TILE_BYTES)
    words = query_bytes(scratch) // 4
    row_bytes = facts.kv_row_bytes if exact else facts.head_dim * 4

    def group(i: Value) -> None:
        if exact:
            rows = f.at(scratch.shared.keys, f.load(I64, scratch.offsets, i * 8))
        else:
            rows = f.at(scratch.values, i * (LANES * row_bytes))
        next_rows = f.at(scratch.shared.keys, f.load(I64, ahead, i * 8))
        for part in _parts(LANES, scratch.sums):

            def word(k: Value, *sums: Value, part: range = part) -> list[Value]:
                step = len(part) * facts.kv_row_bytes // words
                f.prefetch(f.at(next_rows, k * step + part.start * facts.kv_row_bytes), _CACHE)
                column = f.load(WORDS if exact else VECTOR, queries, k * ROW_BYTES)
                out = []
                for token, total in zip(part, sums, strict=True):
                    one = f.broadcast(f.load(I32 if exact else F32, rows, k * 4 + token * row_bytes), LANES)
                    out.append(f.dot_bf16(column, one, total) if exact else f.fma(column, one, total))
                return out

            for token, total in zip(part, f.loop(words, word, *[zero(f)] * len(part)), strict=True):
                f.store(total, products, token * ROW_BYTES)
        tokens = [f.load(VECTOR, products, token * ROW_BYTES) for token in range(LANES)]
        for r, row in enumerate(maths.transpose(f, tokens)):
            f.store(row, scratch.logits, r * (BLOCK * 4) + i * ROW_BYTES)

    f.loop((end - at + (LANES - 1)) // LANES, group, start=first_seen(f, scratch, at) // LANES)


def _multiply_values(f: Function, scratch: BlockScratch, states: Value, keeps: Value, at: Value, end: Value) -> None:
    """Rescale the sums of a panel, and add the products of its weights with the values of a block."""
    facts, exact = scratch.facts, scratch.exact
    size = 2 if exact else 4
    row_bytes = (facts.value_width if exact else facts.head_dim) * 4
    most = max(1, min(WIDE, scratch.sums // STRIP))
    together = max(n for n in range(1, most + 1) if facts.vectors % n == 0)
    begin, count = first_seen(f, scratch, at), end - at
    if exact:
        begin, count = begin // 2, (count + 1) // 2

    for part in _parts(PANEL, STRIP):

        def columns(c: Value, part: range = part) -> None:
            values, own = f.at(scratch.values, c * 64), f.at(states, c * 64)
            places = [f.at(own, r * state_bytes(facts) + 64 * i) for r in part for i in range(together)]

            def step(k: Value, *sums: Value) -> list[Value]:
                some = [f.load(WORDS if exact else VECTOR, values, k * row_bytes + 64 * i) for i in range(together)]
                out = []
                for n, r in enumerate(part):
                    word = f.load(I32 if exact else F32, scratch.weights, k * 4 + r * (BLOCK * size))
                    one = f.broadcast(word, LANES)
                    for column, total in zip(some, sums[n * together : (n + 1) * together], strict=True):
                        out.append(f.dot_bf16(column, one, total) if exact else f.fma(column, one, total))
                return out

            kept = [f.load(VECTOR, keeps, r * 64) for r in part]
            start = [f.load(VECTOR, place) * kept[i // together] for i, place in enumerate(places)]
            for place, total in zip(places, f.loop(count, step, *start, start=begin), strict=True):
                f.store(total, place)

        f.loop(facts.vectors, columns, step=together)


def _parts(count: int, most: int) -> Iterator[range]:
    """Yield about equal parts of `count` rows, with at most `most` in each."""
    parts = -(-count // most)
    for i in range(parts):
        yield range(i * count // parts, (i + 1) * count // parts)
