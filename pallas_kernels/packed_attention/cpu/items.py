"""Work items of the CPU's kernel: the queries of one KV head in one tile of a text, over all tokens they see.

An item takes blocks of the text's keys and values one after another. A block begins at a multiple of 64 tokens of the
text, is laid out once, and is added to a running softmax of each query, by the code that paged attention has for it.
Tokens that a query doesn't see add nothing, not even rounding.
"""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.types import F32, I64, PTR
from pallas_kernels.packed_attention.cpu.blocks import CpuPacked, PackedBlock, PackedOperands, lay_out, make_block
from pallas_kernels.paged_attention.cpu.advance import Strip, advance_laid_out, advance_tiles, multiply_keys
from pallas_kernels.paged_attention.cpu.blocks import (
    BLOCK,
    most_rows,
    query_bytes,
    reset_state,
    state_bytes,
    store_query,
    write_output,
)
from pallas_kernels.paged_attention.cpu.tiles import LANES, MASKED, VECTOR, capped, int_at, positions, splat

TASK_BYTES = 16
"""Size of a task: a text, and the first query of a tile in it."""
_TILE_ROWS = 128


class _PackedQueries(NamedTuple):
    """The queries of an item: of `num_tokens` tokens of the text from `first` on, all heads of a token together.

    A strip is `strip_rows` rows that are computed together. They see tokens of the text from `begin` to `end`. `bias`
    has for each head of the group, `bias_bytes` apart, a number for each distance from `lowest` on.
    """

    first: Value
    num_tokens: Value
    strip_rows: int
    queries: Value
    states: Value
    begin: Value
    end: Value
    lowest: Value
    bias: Value
    bias_bytes: Value


def tile_queries(facts: CpuPacked) -> int:
    """Return the number of tokens whose queries are a tile."""
    return max(1, _TILE_ROWS // facts.group)


def attend(f: Function, item: Value, operands: PackedOperands, facts: CpuPacked, features: frozenset[str]) -> None:
    """Compute item `item` of tiles times KV heads."""
    task, head = f.at(operands.tasks, item // operands.kv_heads * TASK_BYTES), item % operands.kv_heads
    text, first = (f.load(I64, task, at) for at in (0, 8))
    start, stop = (int_at(f, operands.starts, text + i) for i in range(2))
    # With fewer registers than AVX-512's, the sums of several rows would lie in memory
    strip = most_rows(facts, features) if "avx512f" in features else 1
    block = make_block(f, operands, facts, head, start, stop, features, strip)
    own = _make_queries(f, operands, block, head, first, strip)
    head_bytes = facts.head_dim * facts.q_bytes
    offset = ((start + first) * operands.kv_heads + head) * (facts.group * head_bytes)
    stride = operands.kv_heads * (facts.group * head_bytes)

    def place(pointer: Value, r: Value) -> Value:
        return f.at(pointer, offset + r // facts.group * stride + r % facts.group * head_bytes)

    live = own.num_tokens * facts.group
    strips = (live + (strip - 1)) // strip

    def store(r: Value) -> None:
        to, source = f.at(own.queries, r * query_bytes(block)), place(operands.q, r)
        f.when(r < live, lambda: store_query(f, block, source, to), lambda: store_query(f, block, None, to))
        reset_state(f, f.at(own.states, r * state_bytes(facts)), facts)

    def attend_block(at: Value) -> None:
        lay_out(f, block, at, f.minimum(at + BLOCK, own.end))
        f.loop(strips, lambda s: _attend_strip(f, block, own, s, at))

    def write(r: Value) -> None:
        write_output(f, f.at(own.states, r * state_bytes(facts)), None, place(operands.out, r), facts)

    f.loop(strips * strip, store)
    f.loop(own.end, attend_block, start=own.begin, step=BLOCK)
    if block.tiles is not None:
        block.tiles.release()
    f.loop(live, write)
    if facts.has_bias:
        f.call("free", None, own.bias)


def _make_queries(
    f: Function, operands: PackedOperands, block: PackedBlock, head: Value, first: Value, strip: int
) -> _PackedQueries:
    facts = block.facts
    rows = -(-tile_queries(facts) * facts.group // strip) * strip
    queries, states = f.stack(rows * query_bytes(block)), f.stack(rows * state_bytes(facts))
    count = f.minimum(block.length - first, tile_queries(facts))
    begin, end = f.constant(I64, 0), block.length
    if facts.reach is not None:
        begin = f.maximum(first - facts.reach, 0) & -BLOCK
        end = f.minimum(first + count + facts.reach, block.length)
    lowest = begin - first - -(-rows // facts.group)
    own = _PackedQueries(
        first, count, strip, queries, states, begin, end, lowest, f.constant(PTR, 0), f.constant(I64, 0)
    )
    return own if not facts.has_bias else _spread_bias(f, operands, facts, own, head)


def _spread_bias(
    f: Function, operands: PackedOperands, facts: CpuPacked, own: _PackedQueries, head: Value
) -> _PackedQueries:
    """Return the queries with a bias for each distance, so that those of neighbouring tokens are side by side."""
    highest = own.end + BLOCK - own.first
    bias_bytes = (highest - own.lowest) * 4
    bias = f.call("malloc", PTR, bias_bytes * facts.group)
    far = operands.distances // 2

    def spread(g: Value) -> None:
        given, to = f.at(operands.bias, (head * facts.group + g) * operands.distances * 4), f.at(bias, g * bias_bytes)

        def one(distance: Value) -> None:
            cut = f.minimum(f.maximum(distance, 0 - far), far) + far
            f.store(f.load(F32, given, cut * 4), to, (distance - own.lowest) * 4)

        f.loop(highest, one, start=own.lowest)

    f.loop(facts.group, spread)
    return own._replace(bias=bias, bias_bytes=bias_bytes)


def _attend_strip(f: Function, block: PackedBlock, own: _PackedQueries, s: Value, at: Value) -> None:
    """Add a block to a strip that sees any of it."""
    facts = block.facts
    begin = s * own.strip_rows
    pointers = f.at(own.queries, begin * query_bytes(block)), f.at(own.states, begin * state_bytes(facts))

    def logits_of(r: Value, products: list[Value]) -> list[Value]:
        return _logits(f, block, own, begin + r, products, at)

    def attend() -> None:
        strip = Strip(*pointers, own.strip_rows, logits_of)
        if block.tiles is None:
            advance_laid_out(f, block, strip, 0, f.minimum(own.end - at, BLOCK))
        else:
            multiply_keys(f, block, block.tiles, strip.queries)
            advance_tiles(f, block, block.tiles, strip)

    if facts.reach is None:
        attend()
        return
    first, last = (own.first + (begin + r) // facts.group for r in (0, own.strip_rows - 1))
    f.when((at <= last + facts.reach) & (at + (BLOCK - 1 + facts.reach) >= first), attend)


def _logits(
    f: Function, block: PackedBlock, own: _PackedQueries, r: Value, products: list[Value], at: Value
) -> list[Value]:
    """Return the logits of a block's tokens for row r of the item."""
    facts, query = block.facts, own.first + r // block.facts.group
    logits = []
    for i, product in enumerate(products):
        logit, position = capped(f, product, facts), positions(f, at + i * LANES)
        if facts.has_bias:
            to = f.at(own.bias, r % facts.group * own.bias_bytes)
            logit = logit + f.load(VECTOR, to, (at + i * LANES - query - own.lowest) * 4)
        seen = position < splat(f, block.length)
        if facts.reach is not None:
            seen = seen & (position >= splat(f, query - facts.reach)) & (position <= splat(f, query + facts.reach))
        logits.append(f.select(seen, logit, MASKED))
    return logits
