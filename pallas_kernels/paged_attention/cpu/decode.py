"""Decodes on a CPU: one item is the queries of one row, of one KV head or all, over a chunk of its tokens.

The query heads of a KV head, and several queries of a row, share every key and value that is read. Chunks don't depend
on the rest of the batch. The thread that finishes the last chunk of a row's head merges them, in order. So sums depend
on the row alone, and one long row keeps every core busy.
"""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.tile_registers import ROWS
from pallas_kernels.cpu.types import I64
from pallas_kernels.paged_attention.cpu.advance import (
    advance,
    advance_tiles,
    causal_strip,
    lay_out_queries,
    multiply_keys_in_pool,
)
from pallas_kernels.paged_attention.cpu.blocks import (
    BLOCK,
    CHUNK,
    LINE,
    Prefetch,
    find_tokens,
    lay_out_keys,
    lay_out_values,
    make_scratch,
    merge_state,
    most_rows,
    prefetch_of,
    query_bytes,
    reset_state,
    state_bytes,
    store_query,
    write_output,
)
from pallas_kernels.paged_attention.cpu.tiles import (
    LANES,
    TASK_BYTES,
    CpuAttention,
    SharedOperands,
    int_at,
    token_offset,
)

_GROUPS = BLOCK // LANES


class _RowQueries(NamedTuple):
    """The queries of a row: the first token, their number, the position after the last, and the first one seen."""

    token: Value
    number: Value
    length: Value
    sees_from: Value


def partial_bytes(facts: CpuAttention, features: frozenset[str]) -> int:
    """Return the size of an item's result: the states of its query heads."""
    return _padded_heads(facts, features) * state_bytes(facts)


def num_chunks(f: Function, facts: CpuAttention, shared: SharedOperands, row: Value) -> Value:
    """Return the number of chunks of a row."""
    queries = _row_queries(f, facts, shared, row)
    return (queries.length + (CHUNK - 1)) // CHUNK - queries.sees_from // CHUNK


def write_chunks(f: Function, facts: CpuAttention, shared: SharedOperands, count: Value, row: Value) -> Value:
    """List a row's chunks after the first `count` tasks, and return the new number of tasks."""
    chunks = num_chunks(f, facts, shared, row)

    def write_chunk(chunk: Value) -> None:
        task = f.at(shared.tasks, (count + chunk) * TASK_BYTES)
        for i, value in enumerate((row, chunk, count, chunks)):
            f.store(value, task, 8 * i)

    f.loop(chunks, write_chunk)
    return count + chunks


def decode(f: Function, item: Value, shared: SharedOperands, facts: CpuAttention, features: frozenset[str]) -> None:
    """Compute item `item` of tasks times shares of the KV heads."""
    index, share = item // shared.head_shares, item % shared.head_shares
    per_share = shared.kv_heads // shared.head_shares
    task = f.at(shared.tasks, index * TASK_BYTES)
    row, chunk, first_task, chunks = (f.load(I64, task, 8 * i) for i in range(4))
    own_queries = _row_queries(f, facts, shared, row)
    length, sees_from = own_queries.length, own_queries.sees_from
    start = (sees_from // CHUNK + chunk) * CHUNK
    begin, end = f.maximum(start, sees_from & -BLOCK), f.minimum(start + CHUNK, length)
    # The offsets in the pool of the tokens that are read next, by groups of 16
    ahead = f.stack(_GROUPS * 8)
    strip, item_bytes = _strip_heads(facts, features), partial_bytes(facts, features)
    # The loop over heads replaces the head
    scratch = make_scratch(f, shared, facts, row, share, sees_from, features, strip)
    heads = _padded_heads(facts, features)
    queries, columns = (f.stack(n * query_bytes(scratch)) for n in (heads, heads // strip * ROWS))
    live = own_queries.number * facts.group
    # With tile registers there is little time between reads: more reads are under way than a first cache takes
    cache = 1 if scratch.tiles is None else 2
    strips = (live + (strip - 1)) // strip
    head_bytes = facts.head_dim * facts.q_bytes
    token_bytes = shared.kv_heads * (facts.group * head_bytes)
    first_head = share * per_share
    last_head = first_head + per_share

    def decode_head(head: Value) -> None:
        own = scratch._replace(head=head)
        states = f.at(shared.partials, (index * shared.kv_heads + head) * item_bytes)
        first_offset = own_queries.token * token_bytes + head * (facts.group * head_bytes)

        def offset_of(g: Value) -> Value:
            """Return the place of a query head among queries and outputs."""
            return first_offset + g // facts.group * token_bytes + g % facts.group * head_bytes

        def store_head(g: Value) -> None:
            store_query(f, own, f.at(shared.q, offset_of(g)), f.at(queries, g * query_bytes(own)))

        def lay_out_strip(s: Value) -> None:
            of_strip = f.at(queries, s * (strip * query_bytes(own)))
            lay_out_queries(f, own, of_strip, strip, f.at(columns, s * (ROWS * query_bytes(own))))

        f.loop(live, store_head)
        f.loop(strips * strip, lambda g: store_query(f, own, None, f.at(queries, g * query_bytes(own))), start=live)
        f.loop(strips * strip, lambda r: reset_state(f, f.at(states, r * state_bytes(facts)), facts))
        if own.tiles is not None:
            f.loop(strips, lay_out_strip)

        def block(at: Value) -> None:
            stays = at + BLOCK < end
            next_head, next_at = f.select(stays, head, head + 1), f.select(stays, at + BLOCK, begin)
            next_end = f.select(next_head < last_head, end, f.constant(I64, 0))
            stop = f.minimum(at + BLOCK, end)

            def find_next(i: Value) -> None:
                position = next_at + i * LANES
                here = position < next_end
                # If there are no such tokens, prefetch the current ones, which costs nothing
                position = f.select(here, position, at)
                seen_head = f.select(here, next_head, head)
                f.store(token_offset(f, shared, facts, row, seen_head, position), ahead, i * 8)

            f.loop(_GROUPS, find_next)

            prefetch = prefetch_of(f, facts, ahead, cache)
            find_tokens(f, own, at, stop)

            def attend_strip(s: Value, prefetch_next: Prefetch | None = None) -> None:
                first = s * strip
                rows = f.at(states, first * state_bytes(facts))

                def position_of(r: Value) -> Value:
                    return length - own_queries.number + (first + r) // facts.group

                if own.tiles is None:
                    of_strip = f.at(queries, first * query_bytes(own))
                    own_strip = causal_strip(f, facts, at, (of_strip, rows), strip, position_of)
                    advance(f, own, own_strip, at, stop, prefetch_next)
                else:
                    side_by_side = f.at(columns, s * (ROWS * query_bytes(own)))
                    multiply_keys_in_pool(f, own, own.tiles, side_by_side, strip, at, stop, prefetch)
                    own_strip = causal_strip(f, facts, at, (side_by_side, rows), strip, position_of)
                    advance_tiles(f, own, own.tiles, own_strip)

            if own.tiles is not None:
                lay_out_values(f, own, at, stop, prefetch)
                f.loop(strips, attend_strip)
            elif facts.max_queries is None:
                lay_out_keys(f, own, at, stop)
                f.loop(strips, lambda s: attend_strip(s, prefetch))
            else:
                lay_out_keys(f, own, at, stop)
                attend_strip(f.constant(I64, 0), prefetch)

                def attend_others() -> None:
                    lay_out_values(f, own, at, stop)
                    f.loop(strips, attend_strip, start=1)

                f.when(strips > 1, attend_others)
            # Prefetch the groups that were not prefetched beside a token of this block
            groups = (stop - at + (LANES - 1)) // LANES

            def fetch_group(i: Value) -> None:
                _fetch(f, shared, row, next_head, next_at + i * LANES, next_end, facts, cache)

            f.loop(_GROUPS, fetch_group, start=groups)

        f.loop(end, block, start=begin, step=BLOCK)
        counter = f.at(shared.counters, (first_task * shared.kv_heads + head) * 8)

        def merge_chunks() -> None:
            first = f.at(shared.partials, (first_task * shared.kv_heads + head) * item_bytes)
            stride = shared.kv_heads * item_bytes

            def query_head(g: Value) -> None:
                state = f.at(first, g * state_bytes(facts))
                f.loop(chunks, lambda i: merge_state(f, state, f.at(state, i * stride), facts), start=1)
                sink = f.at(shared.sinks, (head * facts.group + g % facts.group) * 4) if facts.sinks else None
                write_output(f, state, sink, f.at(shared.out, offset_of(g)), facts)

            f.loop(live, query_head)

        f.when((f.fetch_add(counter, 1) + 1).equals(chunks), merge_chunks)

    for i in range(_GROUPS):
        _fetch(f, shared, row, first_head, begin + i * LANES, end, facts, cache)
    f.loop(last_head, decode_head, start=first_head)
    if scratch.tiles is not None:
        scratch.tiles.release()


def _row_queries(f: Function, facts: CpuAttention, shared: SharedOperands, row: Value) -> _RowQueries:
    token, count = row, f.constant(I64, 1)
    if facts.max_queries is not None:
        token = int_at(f, shared.query_starts, row)
        count = int_at(f, shared.query_starts, row + 1) - token
    length = int_at(f, shared.kv_lens, row)
    sees_from = f.constant(I64, 0)
    if facts.window is not None:
        sees_from = f.maximum(length - count - (facts.window - 1), 0)
    return _RowQueries(token, count, length, sees_from)


def _strip_heads(facts: CpuAttention, features: frozenset[str]) -> int:
    """Return the number of query heads that are computed together: those of a row in about equal parts."""
    heads = facts.group * (facts.max_queries or 1)
    return -(-heads // -(-heads // most_rows(facts, features)))


def _padded_heads(facts: CpuAttention, features: frozenset[str]) -> int:
    """Return the number of query heads of the largest row, padded to whole strips."""
    heads, strip = facts.group * (facts.max_queries or 1), _strip_heads(facts, features)
    return -(-heads // strip) * strip


def _fetch(
    f: Function,
    shared: SharedOperands,
    row: Value,
    head: Value,
    position: Value,
    end: Value,
    facts: CpuAttention,
    cache: int,
) -> None:
    """Prefetch 16 tokens that will be read soon: pages are too short for a CPU's own prefetcher."""

    def fetch() -> None:
        offset = token_offset(f, shared, facts, row, head, position)

        def fetch_token(i: Value) -> None:
            for pool in (shared.keys, shared.values):
                token = f.at(pool, offset + i * facts.kv_row_bytes)
                for line in range(0, facts.kv_row_bytes, LINE):
                    f.prefetch(f.at(token, line), cache)

        f.loop(LANES, fetch_token)

    f.when(position < end, fetch)
