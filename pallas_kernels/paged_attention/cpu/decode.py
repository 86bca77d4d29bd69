"""Decodes on a CPU: one item is the queries of one row, of one KV head or all, over a chunk of its tokens.

The query heads of a KV head share every key and value that is read. Chunks are the same whatever else there is in the
batch; the thread that finishes the last chunk of a row's head puts them together, in order. So sums depend on the row
alone, and one long row keeps every core busy.
"""

from __future__ import annotations

from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.types import I64
from pallas_kernels.paged_attention.cpu.blocks import (
    BLOCK,
    CHUNK,
    STRIP,
    advance,
    clear_state,
    finish,
    lay_out_keys,
    make_blocks,
    merge_state,
    put_query,
    query_bytes,
    state_bytes,
)
from pallas_kernels.paged_attention.cpu.tiles import LANES, TASK_BYTES, Attention, Work, int_at, token_offset

_LINE = 64
_GROUPS = BLOCK // LANES


def partial_bytes(facts: Attention) -> int:
    """Of what an item leaves: the states of its query heads."""
    return _num_rows(facts) * state_bytes(facts)


def num_chunks(f: Function, facts: Attention, length: Value) -> Value:
    """Items of a row's KV head."""
    return (length + (CHUNK - 1)) // CHUNK - _first(f, facts, length) // CHUNK


def write_chunks(f: Function, facts: Attention, tasks: Value, count: Value, row: Value, length: Value) -> Value:
    """Lists a row's chunks after the first `count` ones, and returns how many there are then."""
    chunks = num_chunks(f, facts, length)

    def one(chunk: Value) -> None:
        task = f.at(tasks, (count + chunk) * TASK_BYTES)
        for i, value in enumerate((row, chunk, count, chunks)):
            f.store(value, task, 8 * i)

    f.loop(chunks, one)
    return count + chunks


def decode(f: Function, item: Value, work: Work, facts: Attention, features: frozenset[str]) -> None:
    """Item `item` of tasks times shares of the KV heads."""
    index, share = item // work.head_shares, item % work.head_shares
    per_share = work.kv_heads // work.head_shares
    task = f.at(work.tasks, index * TASK_BYTES)
    row, chunk, first_task, chunks = (f.load(I64, task, 8 * i) for i in range(4))
    length = int_at(f, work.kv_lens, row)
    sees_from = _first(f, facts, length)
    start = (sees_from // CHUNK + chunk) * CHUNK
    begin, end = f.most(start, sees_from & -BLOCK), f.least(start + CHUNK, length)
    # Where those tokens stand in the pool that are read next, by groups of 16
    ahead = f.stack(_GROUPS * 8)
    # The head is filled in by each turn of the loop over heads
    blocks = make_blocks(f, work, facts, row, share, sees_from, features)
    queries = f.stack(_num_rows(facts) * query_bytes(blocks))
    first_head = share * per_share
    last_head = first_head + per_share

    def one(head: Value) -> None:
        own = blocks._replace(head=head)
        states = f.at(work.partials, (index * work.kv_heads + head) * partial_bytes(facts))
        of_row = (row * work.kv_heads + head) * (facts.group * facts.head_dim * facts.q_bytes)
        for r in range(facts.group, _num_rows(facts)):
            put_query(f, own, None, f.at(queries, r * query_bytes(own)))

        def put(g: Value) -> None:
            come = f.at(work.q, of_row + g * (facts.head_dim * facts.q_bytes))
            put_query(f, own, come, f.at(queries, g * query_bytes(own)))

        f.loop(facts.group, put)
        f.loop(_num_rows(facts), lambda r: clear_state(f, f.at(states, r * state_bytes(facts)), facts))

        def block(at: Value) -> None:
            stays = at + BLOCK < end
            next_head, next_at = f.select(stays, head, head + 1), f.select(stays, at + BLOCK, begin)
            next_end = f.select(next_head < last_head, end, f.constant(I64, 0))
            stop = f.least(at + BLOCK, end)

            def aim(i: Value) -> None:
                position = next_at + i * LANES
                here = position < next_end
                # Without any, what is asked for lies at hand already
                position = f.select(here, position, at)
                seen_head = f.select(here, next_head, head)
                f.store(token_offset(f, work, facts, row, seen_head, position), ahead, i * 8)

            f.loop(_GROUPS, aim)

            def ask(token: Value, count: int) -> None:
                offset = f.load(I64, ahead, token // LANES * 8) + token % LANES * facts.kv_row_bytes
                for t in range(count):
                    _fetch_token(f, work, offset + t * facts.kv_row_bytes, facts)

            lay_out_keys(f, own, at, stop)

            def strip(s: Value) -> None:
                first = s * _strip(facts)
                rows = f.at(states, first * state_bytes(facts))
                asked = [length - 1] * _strip(facts)
                advance(f, own, f.at(queries, first * query_bytes(own)), rows, asked, at, stop, ask)

            f.loop(_num_rows(facts) // _strip(facts), strip)
            # What wasn't asked for beside a token of this block
            groups = (stop - at + (LANES - 1)) // LANES
            f.loop(
                _GROUPS,
                lambda i: _fetch(f, work, row, next_head, next_at + i * LANES, next_end, facts),
                start=groups,
            )

        f.loop(end, block, start=begin, step=BLOCK)
        counter = f.at(work.counters, (first_task * work.kv_heads + head) * 8)

        def put_together() -> None:
            first = f.at(work.partials, (first_task * work.kv_heads + head) * partial_bytes(facts))
            stride = work.kv_heads * partial_bytes(facts)

            def query_head(g: Value) -> None:
                state = f.at(first, g * state_bytes(facts))
                f.loop(chunks, lambda i: merge_state(f, state, f.at(state, i * stride), facts), start=1)
                to = f.at(work.out, of_row + g * (facts.head_dim * facts.q_bytes))
                finish(f, state, f.at(work.sinks, (head * facts.group + g) * 4), to, facts)

            f.loop(facts.group, query_head)

        f.when((f.fetch_add(counter, 1) + 1).same(chunks), put_together)

    for i in range(_GROUPS):
        _fetch(f, work, row, first_head, begin + i * LANES, end, facts)
    f.loop(last_head, one, start=first_head)


def _strip(facts: Attention) -> int:
    """Query heads that advance together: about equal parts of a group."""
    return -(-facts.group // -(-facts.group // STRIP))


def _num_rows(facts: Attention) -> int:
    """A group of query heads in whole strips."""
    return -(-facts.group // _strip(facts)) * _strip(facts)


def _first(f: Function, facts: Attention, length: Value) -> Value:
    """The first position that is seen."""
    return f.constant(I64, 0) if facts.window is None else f.most(length - facts.window, 0)


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
