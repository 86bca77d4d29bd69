"""Prefill on Triton: a work list of query tiles over paged keys and values, causal.

A tile has some queries of one row with all query heads of one KV head. Its rows are (query, head) pairs, so any ratio
of heads fills it, and keys and values are read once for all of them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.triton.tiles import (
    LOG2E,
    PoolRefs,
    Ref,
    SoftmaxState,
    TritonAttention,
    advance,
    empty_softmax,
    kv_scale,
    load_rows,
    pool_rows,
    store_rows,
)


class PrefillBlocks(NamedTuple):
    """A tile has `block_q` (query, head) pairs over `block_kv` tokens."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


class WorkList(NamedTuple):
    """Query tiles of all rows: their number, the row of each, and its first query in the row."""

    live: Int[Array, " 1"]
    rows: Int[Array, " tiles"]
    offsets: Int[Array, " tiles"]


_Carry = tuple[SoftmaxState, tuple[Array, Array]]


class _PrefillInputs(NamedTuple):
    query_starts: Ref
    kv_lens: Ref
    q: Ref


def work_list(query_starts: Array, num_decodes: Array, num_seqs: Array, *, tokens: int, tile: int) -> WorkList:
    """List tiles of `tile` queries of rows `[num_decodes, num_seqs)`; sized for the most that `tokens` can need."""
    rows = query_starts.shape[0] - 1
    row = jnp.arange(rows, dtype=jnp.int32)
    live = (row >= num_decodes) & (row < num_seqs)
    tiles = jnp.where(live, (query_starts[1:] - query_starts[:-1] + tile - 1) // tile, 0)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    at = jnp.arange(tokens // tile + min(rows, tokens), dtype=jnp.int32)
    owner = jnp.searchsorted(ends, at, side="right", method="compare_all").astype(jnp.int32)
    owner = jnp.minimum(owner, rows - 1)
    return WorkList(ends[-1:], owner, (at - ends[owner] + tiles[owner]) * tile)


def prefill(
    q: Float[Array, "tokens heads head_dim"],
    out: Float[Array, "tokens heads head_dim"],
    pool: PoolRefs,
    query_starts: Array,
    kv_lens: Array,
    num_decodes: Array,
    num_seqs: Array,
    sinks: Array | None,
    attention: TritonAttention,
    blocks: PrefillBlocks,
    *,
    interpret: bool,
) -> Float[Array, "tokens heads head_dim"]:
    """Return `out` with the output of rows `[num_decodes, num_seqs)` written into it."""
    work = work_list(query_starts, num_decodes, num_seqs, tokens=q.shape[0], tile=blocks.block_q // attention.group)
    return pl.pallas_call(
        functools.partial(_prefill, attention=attention, blocks=blocks),
        grid=(attention.kv_heads, work.rows.shape[0]),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="paged_attention_prefill",
    )(out, work, _PrefillInputs(query_starts, kv_lens, q), pool, sinks)


def _prefill(
    before: Ref,
    work: WorkList,
    rows: _PrefillInputs,
    pool: PoolRefs,
    sinks: Ref | None,
    out: Ref,
    *,
    attention: TritonAttention,
    blocks: PrefillBlocks,
) -> None:
    # The last tiles of a row take longest, as they see most of it, so they start first.
    kv_head, tile = pl.program_id(0), work.live[0] - 1 - pl.program_id(1)

    @pl.when(tile >= 0)
    def run() -> None:
        row, offset = work.rows[tile], work.offsets[tile]
        group, block = attention.group, blocks.block_kv
        query_end, length = rows.query_starts[row + 1], rows.kv_lens[row]
        pair = lax.iota(jnp.int32, blocks.block_q)
        token = rows.query_starts[row] + offset + lax.div(pair, group)
        head = kv_head * group + lax.rem(pair, group)
        queries = blocks.block_q // group
        live = (token < query_end) & (pair < queries * group)
        q = load_rows(rows.q, (token, head), live, attention)
        query_positions = length - query_end + token
        first_query = length - query_end + rows.query_starts[row] + offset
        end = jnp.minimum(first_query + queries, length)
        key_scale = kv_scale(pool, 0, kv_head)

        # Indices are looked up a tile ahead, so that loads of keys and values wait for no other load.
        def tile_at(i: Array) -> tuple[Array, Array]:
            position = i * block + lax.iota(jnp.int32, block)
            held = position < end
            if attention.window is not None:
                held &= position > first_query - attention.window
            return pool_rows(pool, row, kv_head, position, held, attention), held

        def unmasked(i: Array, carry: _Carry) -> _Carry:
            state, (at, _) = carry
            keys = load_rows(pool.keys, (at,), None, attention)
            values = load_rows(pool.values, (at,), None, attention)
            return advance(state, q, keys, values, None, key_scale, attention), tile_at(i + 1)

        def masked(i: Array, carry: _Carry) -> _Carry:
            state, (at, held) = carry
            position = i * block + lax.iota(jnp.int32, block)
            seen = held[None, :] & (position[None, :] <= query_positions[:, None])
            if attention.window is not None:
                seen &= position[None, :] > query_positions[:, None] - attention.window
            keys = load_rows(pool.keys, (at,), held, attention)
            values = load_rows(pool.values, (at,), held, attention)
            return advance(state, q, keys, values, seen, key_scale, attention), tile_at(i + 1)

        # Tiles that all queries see whole need no masks; with a window there are few of these.
        first, seen_by_all = jnp.int32(0), lax.div(first_query + 1, block)
        if attention.window is not None:
            first = seen_by_all = lax.div(jnp.maximum(first_query - attention.window + 1, 0), block)
        carry = empty_softmax(blocks.block_q, attention.lanes), tile_at(first)
        if attention.window is None:
            carry = lax.fori_loop(0, seen_by_all, unmasked, carry)
        state, _ = lax.fori_loop(seen_by_all, pl.cdiv(end, block), masked, carry)
        total = state.total
        if sinks is not None:
            sink = plgpu.load(sinks.at[head], mask=live, other=0.0) * LOG2E
            total = total + jnp.exp2(sink - state.peak)
        # A pair that isn't live may have seen nothing, but it isn't written either.
        done = state.out * (kv_scale(pool, 1, kv_head) / total)[:, None]
        store_rows(out, (token, head), done, live, attention)
