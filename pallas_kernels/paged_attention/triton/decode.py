"""Decode on Triton: one query a row, its tokens split over programs, the last of which combines their partial sums.

A program takes all query heads of a KV head, so that keys and values are read once. The number of splits of a row
depends on its own length alone, and they are combined in order, so a row's sums are the same whatever other rows there
are.
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
    MASKED,
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
from pallas_kernels.paged_attention.triton.work_list import WorkList, for_each_item, num_programs, work_list

# Rows of the smallest tile of tensor cores.
MIN_ROWS = 16

# The fewest tokens of a split, and the most, unless a row would have more than `most_splits`.
_FEWEST_TOKENS, _MOST_TOKENS = 128, 2048


class DecodeBlocks(NamedTuple):
    """A tile has `block_kv` tokens. A row has `splits` splits a KV head; short rows have fewer, long rows more.

    `most_splits` is how many the longest rows have, and `programs` how many programs the GPU runs at once.
    """

    block_kv: int
    splits: int
    most_splits: int
    programs: int
    num_warps: int
    num_stages: int


class _DecodeInputs(NamedTuple):
    kv_lens: Ref
    q: Ref
    sinks: Ref | None


class _SplitOutputs(NamedTuple):
    """Normalized outputs of each split, and their log-sum-exps to base 2."""

    out: Ref
    lse: Ref


def decode(
    q: Float[Array, "tokens heads head_dim"],
    pool: PoolRefs,
    arrivals: Int[Array, "tokens kv_heads"],
    kv_lens: Array,
    num_decodes: Array,
    sinks: Array | None,
    attention: TritonAttention,
    blocks: DecodeBlocks,
    *,
    interpret: bool,
) -> Float[Array, "tokens heads head_dim"]:
    """Return the output of tokens `[0, num_decodes)`; the output of other tokens is not written.

    `arrivals`, which counts finished splits, is zero and overwritten.
    """
    tokens, heads, head_dim = q.shape
    rows = min(tokens, kv_lens.shape[0])
    lengths = kv_lens[:rows]
    first, end, each = _tiles(lengths, attention, blocks)
    splits = jnp.where(jnp.arange(rows, dtype=jnp.int32) < num_decodes, pl.cdiv(end - first, each), 0)
    work = work_list(splits, lengths, rows * blocks.most_splits)
    programs = num_programs(work, attention.kv_heads, blocks.programs, interpret=interpret)
    out, *_ = pl.pallas_call(
        functools.partial(_decode, attention=attention, blocks=blocks, programs=programs, interpret=interpret),
        grid=(programs,),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(arrivals.shape, arrivals.dtype),
            _SplitOutputs(
                jax.ShapeDtypeStruct((rows, heads, blocks.most_splits, head_dim), jnp.float32),
                jax.ShapeDtypeStruct((rows, heads, blocks.most_splits), jnp.float32),
            ),
        ),
        input_output_aliases={0: 1},
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="paged_attention_decode",
    )(arrivals, work, _DecodeInputs(kv_lens, q, sinks), pool)
    return out


def _tiles(length: Array, attention: TritonAttention, blocks: DecodeBlocks) -> tuple[Array, Array, Array]:
    """Return the first tile, the end, and the number of tiles of a split: of a row, or of all rows."""
    end = pl.cdiv(length, blocks.block_kv)
    first = jnp.zeros_like(end)
    if attention.window is not None:
        first = lax.div(jnp.maximum(length - attention.window, 0), blocks.block_kv)
    tiles = end - first
    fewest, most = (max(1, tokens // blocks.block_kv) for tokens in (_FEWEST_TOKENS, _MOST_TOKENS))
    each = jnp.clip(pl.cdiv(tiles, blocks.splits), fewest, most)
    return first, end, jnp.maximum(each, pl.cdiv(tiles, blocks.most_splits))


def _decode(
    _: Ref,
    work: WorkList,
    rows: _DecodeInputs,
    pool: PoolRefs,
    out: Ref,
    arrivals: Ref,
    partial: _SplitOutputs,
    *,
    attention: TritonAttention,
    blocks: DecodeBlocks,
    programs: int,
    interpret: bool,
) -> None:
    """Compute splits. A row's only split writes the final output, else the last one to be done combines them."""

    def compute(row: Array, split: Array, kv_head: Array) -> None:
        first, end, each = _tiles(rows.kv_lens[row], attention, blocks)
        at = first + split * each
        state, head, live = _attend(rows, pool, row, kv_head, at, jnp.minimum(at + each, end), attention, blocks)
        value_scale = kv_scale(pool, 1, kv_head)
        used = pl.cdiv(end - first, each)

        def finish(state: SoftmaxState, factor: Array | float) -> None:
            total = state.total
            if rows.sinks is not None:
                sink = plgpu.load(rows.sinks.at[head], mask=live, other=0.0) * LOG2E
                total = total + jnp.exp2(sink - state.peak)
            store_rows(out, (row, head), state.out * (factor / total)[:, None], live, attention)

        @pl.when(used <= 1)
        def store_whole() -> None:
            finish(state, value_scale)

        @pl.when(used > 1)
        def store_part() -> None:
            done = state.out * (value_scale / state.total)[:, None]
            store_rows(partial.out, (row, head, split), done, live, attention)
            plgpu.store(partial.lse.at[row, head, split], state.peak + jnp.log2(state.total), mask=live)
            # All threads have stored before one of them says so, by an atomic that releases and acquires.
            if not interpret:
                plgpu.debug_barrier()

            @pl.when(plgpu.atomic_add(arrivals, (row, kv_head), jnp.int32(1)) == used - 1)
            def combine() -> None:
                finish(_combined(partial, row, head, used, live, attention), 1.0)

    for_each_item(work, attention.kv_heads, programs, compute)


def _combined(
    partial: _SplitOutputs, row: Array, head: Array, used: Array, live: Array, attention: TritonAttention
) -> SoftmaxState:
    """Return the softmax over all splits of a row, each of which counts as one token."""

    def add(split: Array, state: SoftmaxState) -> SoftmaxState:
        lse = plgpu.load(partial.lse.at[row, head, split], mask=live, other=MASKED)
        peak = jnp.maximum(state.peak, lse)
        keep, weight = jnp.exp2(state.peak - peak), jnp.exp2(lse - peak)
        part = load_rows(partial.out, (row, head, split), live, attention)
        out = state.out * keep[:, None] + part * weight[:, None]
        return SoftmaxState(out, peak, state.total * keep + weight)

    return lax.fori_loop(0, used, add, empty_softmax(head.shape[0], attention.lanes))


def _attend(
    rows: _DecodeInputs,
    pool: PoolRefs,
    row: Array,
    kv_head: Array,
    first: Array,
    end: Array,
    attention: TritonAttention,
    blocks: DecodeBlocks,
) -> tuple[SoftmaxState, Array, Array]:
    """Return the softmax over tiles `[first, end)`, the heads of its rows, and which of these exist."""
    size = max(MIN_ROWS, pl.next_power_of_2(attention.group))
    member = lax.iota(jnp.int32, size)
    head, live = kv_head * attention.group + member, member < attention.group
    q = load_rows(rows.q, (row, head), live, attention)
    length = rows.kv_lens[row]
    first_seen = 0 if attention.window is None else jnp.maximum(length - attention.window, 0)
    key_scale = kv_scale(pool, 0, kv_head)

    def body(tile: Array, state: SoftmaxState) -> SoftmaxState:
        position = tile * blocks.block_kv + lax.iota(jnp.int32, blocks.block_kv)
        seen = (position >= first_seen) & (position < length)
        # Tokens that the query doesn't see may be NaN: others are read in their place.
        at = pool_rows(pool, row, kv_head, jnp.clip(position, first_seen, length - 1), attention)
        keys, values = (load_rows(array, (at,), None, attention) for array in (pool.keys, pool.values))
        return advance(state, q, keys, values, seen[None, :], key_scale, attention)

    state = lax.fori_loop(first, end, body, empty_softmax(size, attention.lanes))
    return state, head, live
