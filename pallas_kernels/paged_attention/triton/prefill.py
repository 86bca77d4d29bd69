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
from jaxtyping import Array, Float

from pallas_kernels.paged_attention.arguments import Rows
from pallas_kernels.paged_attention.triton.tiles import (
    LOG2E,
    PoolRefs,
    Ref,
    SoftmaxState,
    TritonAttention,
    advance,
    empty_softmax,
    kv_scale,
    load_kv,
    load_queries,
    pool_rows,
    store_rows,
)
from pallas_kernels.paged_attention.triton.work_list import WorkList, for_each_item, num_programs, work_list


class PrefillBlocks(NamedTuple):
    """A tile has `block_q` (query, head) pairs over `block_kv` tokens; the GPU runs `programs` programs at once.

    With `masks_all` there is one loop, with masks, instead of two: it takes fewer registers.
    """

    block_q: int
    block_kv: int
    masks_all: bool
    programs: int
    num_warps: int
    num_stages: int


class _PrefillInputs(NamedTuple):
    query_starts: Ref
    kv_lens: Ref
    q: tuple[Ref, ...]
    sinks: Ref | None


def prefill(
    q: tuple[Float[Array, "tokens heads numbers"], ...],
    out: Float[Array, "tokens heads value_dim"] | None,
    pool: PoolRefs,
    rows: Rows,
    sinks: Array | None,
    attention: TritonAttention,
    blocks: PrefillBlocks,
) -> Float[Array, "tokens heads value_dim"]:
    """Return `out` with the output of rows `[num_decodes, num_seqs)` written into it.

    Without `out`, only their output is written. `q` is one array or two, as for `decode`.
    """
    tile = blocks.block_q // attention.group
    tokens, heads, _ = q[0].shape
    num_rows = rows.kv_lens.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    live = (row >= rows.num_decodes) & (row < rows.num_seqs)
    tiles = jnp.where(live, pl.cdiv(rows.query_starts[1:] - rows.query_starts[:-1], tile), 0)
    work = work_list(tiles, rows.kv_lens, tokens // tile + min(num_rows, tokens))
    programs = num_programs(work, attention.kv_heads, blocks.programs, interpret=attention.interpret)
    return pl.pallas_call(
        functools.partial(_prefill, attention=attention, blocks=blocks, programs=programs),
        grid=(programs,),
        out_shape=jax.ShapeDtypeStruct((tokens, heads, attention.output_dim), q[0].dtype),
        input_output_aliases={} if out is None else {0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=attention.interpret,
        name="paged_attention_prefill",
    )(out, work, _PrefillInputs(rows.query_starts, rows.kv_lens, q, sinks), pool)


def _prefill(
    _: Ref | None,
    work: WorkList,
    rows: _PrefillInputs,
    pool: PoolRefs,
    out: Ref,
    *,
    attention: TritonAttention,
    blocks: PrefillBlocks,
    programs: int,
) -> None:
    group, block, window = attention.group, blocks.block_kv, attention.window
    queries = blocks.block_q // group

    def compute(row: Array, part: Array, kv_head: Array) -> None:
        query_start, query_end, length = rows.query_starts[row], rows.query_starts[row + 1], rows.kv_lens[row]
        # The last tiles of a row take longest, as they see most of it, so they come first.
        offset = (pl.cdiv(query_end - query_start, queries) - 1 - part) * queries
        pair = lax.iota(jnp.int32, blocks.block_q)
        token = query_start + offset + lax.div(pair, group)
        head = kv_head * group + lax.rem(pair, group)
        live = (token < query_end) & (pair < queries * group)
        q = load_queries(rows.q, (token, head), live, attention)
        query_positions = length - query_end + token
        first_query = length - query_end + query_start + offset
        end = jnp.minimum(first_query + queries, length)
        first_seen = jnp.int32(0) if window is None else jnp.maximum(first_query - window + 1, 0)
        key_scale = kv_scale(pool, 0, kv_head)

        def step(i: Array, state: SoftmaxState, *, masked: bool) -> SoftmaxState:
            position = i * block + lax.iota(jnp.int32, block)
            seen = None
            if masked:
                seen = position[None, :] <= query_positions[:, None]
                if window is not None:
                    seen &= position[None, :] > query_positions[:, None] - window
                # Tokens that no query sees may be NaN: others are read in their place.
                position = jnp.clip(position, first_seen, end - 1)
            at = pool_rows(pool, row, kv_head, position, attention)
            keys, values = load_kv(pool, at, attention)
            return advance(state, q, keys, values, seen, key_scale, attention)

        # Tiles that all queries see whole need no masks; with a window there are few of these.
        masks_all = window is not None or blocks.masks_all
        seen_by_all = lax.div(first_seen if masks_all else first_query + 1, block)
        state = empty_softmax(blocks.block_q, attention.values)
        if not masks_all:
            state = lax.fori_loop(0, seen_by_all, functools.partial(step, masked=False), state)
        state = lax.fori_loop(seen_by_all, pl.cdiv(end, block), functools.partial(step, masked=True), state)
        total = state.total
        if rows.sinks is not None:
            sink = plgpu.load(rows.sinks.at[head], mask=live, other=0.0) * LOG2E
            total = total + jnp.exp2(sink - state.peak)
        # A pair that isn't live may have seen nothing, but it isn't written either.
        factor = kv_scale(pool, 1, kv_head) / total
        for part, span in zip(state.out, attention.values, strict=True):
            store_rows(out, (token, head), part * factor[:, None], live, span)

    for_each_item(work, attention.kv_heads, programs, compute)
