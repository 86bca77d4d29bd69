"""Decode on Triton: one query a row, its tokens split over programs, the last of which combines their partial sums.

A program takes all query heads of a KV head, so that keys and values are read once. The number of splits of a row
depends on its own length alone, and they are combined in order, so a row's sums are the same whatever other rows there
are.

Heads that share latent rows are more than a program has registers for, so they are several items. These are neighbours
in the work list and computed at the same time: one brings the rows from device memory, the others find them in the L2
cache.

Rows may also be consecutive queries of one sequence. Queries that are split alike are packed into one tile, which reads
keys and values once for all of them. Tokens that a query doesn't see add nothing, so its sums are the same as alone.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.arguments import DecodeRows
from pallas_kernels.paged_attention.triton.tiles import (
    LOG2E,
    MASKED,
    HeadSpan,
    PoolRefs,
    Ref,
    SoftmaxState,
    TritonAttention,
    advance,
    empty_softmax,
    kv_scale,
    load_kv,
    load_queries,
    load_rows,
    pool_rows,
    store_rows,
)
from pallas_kernels.paged_attention.triton.work_list import WorkList, for_each_item, num_programs, work_list

# Rows of the smallest tile of tensor cores.
MIN_ROWS = 16

# The fewest tokens of a split, and the most, unless a row would have more than `most_splits`.
_FEWEST_TOKENS, _MOST_TOKENS = 128, 2048
# Partial sums of latent rows, of 512 numbers a head, take longer to store and combine.
_FEWEST_LATENT_TOKENS = 256


class DecodeBlocks(NamedTuple):
    """A tile has `block_kv` tokens. A row has `splits` splits a KV head; short rows have fewer, long rows more.

    `most_splits` is how many the longest rows have, and `programs` how many programs the GPU runs at once. At most
    `queries` queries of a sequence are packed into a tile.
    """

    block_kv: int
    splits: int
    most_splits: int
    programs: int
    num_warps: int
    num_stages: int
    queries: int = 1


class _Packs(NamedTuple):
    """The row of each query in the page table, and how many queries are packed with it; 0 if another one leads."""

    table_rows: Ref
    counts: Ref


class _DecodeInputs(NamedTuple):
    work: WorkList
    kv_lens: Ref
    packs: _Packs | None
    q: tuple[Ref, ...]
    sinks: Ref | None


class _SplitOutputs(NamedTuple):
    """Normalized outputs of each split, and their log-sum-exps to base 2."""

    out: Ref
    lse: Ref


def decode(
    q: tuple[Float[Array, "tokens heads numbers"], ...],
    arrivals: Int[Array, "tokens kv_heads"],
    pool: PoolRefs,
    rows: DecodeRows,
    sinks: Array | None,
    attention: TritonAttention,
    blocks: DecodeBlocks,
) -> Float[Array, "tokens heads value_dim"]:
    """Return the output of the first `num_decodes` rows; the output of other tokens is not written.

    `q` is one array; or two, of which the second has the numbers of the last tile of a key.
    `arrivals`, which counts finished splits, is zero and overwritten.
    """
    tokens, heads, _ = q[0].shape
    value_dim = attention.output_dim
    kv_lens, num_decodes, table_rows = rows
    most = min(tokens, kv_lens.shape[0])
    lengths = kv_lens[:most]
    first, end, each = _tiles(lengths, attention, blocks)
    splits = jnp.where(jnp.arange(most, dtype=jnp.int32) < num_decodes, pl.cdiv(end - first, each), 0)
    packs = None
    if table_rows is not None:
        counts = _pack_counts([table_rows, first, each], num_decodes, blocks.queries)
        packs = _Packs(table_rows, counts)
        last = jnp.maximum(jnp.arange(most, dtype=jnp.int32) + counts - 1, 0)
        splits = jnp.where(counts > 0, splits[last], 0)
    work = work_list(splits, lengths, most * blocks.most_splits)
    programs = num_programs(work, attention.kv_heads, blocks.programs, interpret=attention.interpret)
    blocks = blocks._replace(programs=programs)
    out, *_ = pl.pallas_call(
        functools.partial(_decode, attention=attention, blocks=blocks),
        grid=(programs,),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, heads, value_dim), q[0].dtype),
            jax.ShapeDtypeStruct(arrivals.shape, arrivals.dtype),
            _SplitOutputs(
                jax.ShapeDtypeStruct((most, heads, blocks.most_splits, value_dim), jnp.float32),
                jax.ShapeDtypeStruct((most, heads, blocks.most_splits), jnp.float32),
            ),
        ),
        input_output_aliases={0: 1},
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=attention.interpret,
        name="paged_attention_decode",
    )(arrivals, _DecodeInputs(work, kv_lens, packs, q, sinks), pool)
    return out


def _pack_counts(same: list[Int[Array, " tokens"]], live: Array, most: int) -> Int[Array, " tokens"]:
    """Return how many tokens each pack has, at its first token; 0 for others. All tokens of a pack have equal numbers
    in each array of `same`."""
    token = jnp.arange(same[0].shape[0], dtype=jnp.int32)
    begins = functools.reduce(jnp.logical_or, (x != jnp.roll(x, 1) for x in same), token == 0)
    before = token <= token[:, None]
    start = jnp.max(jnp.where(before & begins, token, 0), axis=1)
    leads = ((token - start) % most == 0) & (token < live)
    end = jnp.min(jnp.where(~before & leads, token, live), axis=1)
    return jnp.where(leads, end - token, 0)


def _tiles(length: Array, attention: TritonAttention, blocks: DecodeBlocks) -> tuple[Array, Array, Array]:
    """Return the first tile, the end, and the number of tiles of a split; for one row, or for all rows."""
    end = pl.cdiv(length, blocks.block_kv)
    first = jnp.zeros_like(end)
    if attention.window is not None:
        first = lax.div(jnp.maximum(length - attention.window, 0), blocks.block_kv)
    tiles = end - first
    fewest_tokens = _FEWEST_TOKENS if attention.value_dim is None else _FEWEST_LATENT_TOKENS
    fewest, most = (max(1, tokens // blocks.block_kv) for tokens in (fewest_tokens, _MOST_TOKENS))
    each = jnp.clip(pl.cdiv(tiles, blocks.splits), fewest, most)
    return first, end, jnp.maximum(each, pl.cdiv(tiles, blocks.most_splits))


def _decode(
    _: Ref,
    rows: _DecodeInputs,
    pool: PoolRefs,
    out: Ref,
    arrivals: Ref,
    partial: _SplitOutputs,
    *,
    attention: TritonAttention,
    blocks: DecodeBlocks,
) -> None:
    """Compute splits. A row's only split writes the final output; of several, the last to be done combines them."""

    def compute(row: Array, split: Array, kv_head: Array) -> None:
        queries = _queries(rows, row, kv_head, attention, blocks)
        token, head, live = queries.token, queries.head, queries.live
        first, end, each = _tiles(queries.length, attention, blocks)
        at = first + split * each
        state = _attend(rows, pool, queries, kv_head, at, jnp.minimum(at + each, end), attention, blocks)
        value_scale = kv_scale(pool, 1, kv_head)
        used = pl.cdiv(end - first, each)

        def finish(state: SoftmaxState, factor: Array | float, spans: tuple[HeadSpan, ...]) -> None:
            total = state.total
            if rows.sinks is not None:
                sink = plgpu.load(rows.sinks.at[head], mask=live, other=0.0) * LOG2E
                total = total + jnp.exp2(sink - state.peak)
            for part, span in zip(state.out, spans, strict=True):
                store_rows(out, (token, head), part * (factor / total)[:, None], live, span)

        @pl.when(used <= 1)
        def store_whole() -> None:
            finish(state, value_scale, attention.values)

        @pl.when(used > 1)
        def store_part() -> None:
            # A packed query may see nothing of the last split.
            total = state.total if rows.packs is None else jnp.where(state.total > 0, state.total, 1.0)
            for part, span in zip(state.out, attention.values, strict=True):
                store_rows(partial.out, (token, head, split), part * (value_scale / total)[:, None], live, span)
            plgpu.store(partial.lse.at[token, head, split], state.peak + jnp.log2(state.total), mask=live)
            # All threads have stored before one of them says so, by an atomic that releases and acquires.
            if not attention.interpret:
                plgpu.debug_barrier()

            @pl.when(plgpu.atomic_add(arrivals, (row, kv_head), jnp.int32(1)) == used - 1)
            def combine() -> None:
                for span in attention.values:
                    finish(_combined(partial, queries, used, span), 1.0, (span,))

    for_each_item(rows.work, attention.kv_heads, blocks.programs, compute)


class _Queries(NamedTuple):
    """The queries of an item: token and head of each row of its tile, which exist, and their first seen positions.

    `length` is the length at the last query, `past` the position after each, `table_row` the row of the page table.
    """

    token: Any
    head: Array
    live: Array
    past: Any
    first_seen: Any
    length: Array
    first_past: Array
    table_row: Array


def _queries(
    rows: _DecodeInputs, row: Array, kv_head: Array, attention: TritonAttention, blocks: DecodeBlocks
) -> _Queries:
    """Return the queries of the item that `row` leads."""
    length, group = rows.kv_lens[row], attention.group
    member = lax.iota(jnp.int32, max(MIN_ROWS, pl.next_power_of_2(group * blocks.queries)))

    def first_seen(past: Array) -> Any:
        return 0 if attention.window is None else jnp.maximum(past - attention.window, 0)

    if rows.packs is None or blocks.queries == 1:
        head, table_row = kv_head * group + member, row if rows.packs is None else rows.packs.table_rows[row]
        return _Queries(row, head, member < group, length, first_seen(length), length, length, table_row)
    count, number = rows.packs.counts[row], lax.div(member, group)
    past = (length + number)[:, None]
    return _Queries(
        row + number,
        kv_head * group + lax.rem(member, group),
        number < count,
        past,
        first_seen(past),
        length + count - 1,
        length,
        rows.packs.table_rows[row],
    )


def _combined(partial: _SplitOutputs, queries: _Queries, used: Array, span: HeadSpan) -> SoftmaxState:
    """Return the softmax over all splits of a row, each of which counts as one token, with a span of its output."""
    token, head, live = queries.token, queries.head, queries.live

    def add(split: Array, state: SoftmaxState) -> SoftmaxState:
        lse = plgpu.load(partial.lse.at[token, head, split], mask=live, other=MASKED)
        peak = jnp.maximum(state.peak, lse)
        keep, weight = jnp.exp2(state.peak - peak), jnp.exp2(lse - peak)
        part = load_rows(partial.out, (token, head, split), live, span)
        out = state.out[0] * keep[:, None] + part * weight[:, None]
        return SoftmaxState((out,), peak, state.total * keep + weight)

    return lax.fori_loop(0, used, add, empty_softmax(head.shape[0], (span,)))


def _attend(
    rows: _DecodeInputs,
    pool: PoolRefs,
    queries: _Queries,
    kv_head: Array,
    first: Array,
    end: Array,
    attention: TritonAttention,
    blocks: DecodeBlocks,
) -> SoftmaxState:
    """Return the softmax of the queries over tiles `[first, end)`."""
    q = load_queries(rows.q, (queries.token, queries.head), queries.live, attention)
    low = 0 if attention.window is None else jnp.maximum(queries.first_past - attention.window, 0)
    key_scale = kv_scale(pool, 0, kv_head)

    def body(tile: Array, state: SoftmaxState) -> SoftmaxState:
        position = tile * blocks.block_kv + lax.iota(jnp.int32, blocks.block_kv)
        seen = (position[None, :] >= queries.first_seen) & (position[None, :] < queries.past)
        # Tokens that no query sees may be NaN: others are read in their place.
        at = pool_rows(pool, queries.table_row, kv_head, jnp.clip(position, low, queries.length - 1), attention)
        keys, values = load_kv(pool, at, attention)
        return advance(state, q, keys, values, seen, key_scale, attention)

    return lax.fori_loop(first, end, body, empty_softmax(queries.head.shape[0], attention.values))
