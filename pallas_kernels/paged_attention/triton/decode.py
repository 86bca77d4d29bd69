"""Decode on Triton: one query a row, its tokens split over programs whose partial sums a second kernel combines.

A program takes all query heads of a KV head, so that keys and values are read once. The number of programs that share a
row depends on its own length alone, so a row's sums are the same whatever other rows there are. Programs without work
end at once.
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

# Rows of the smallest tile of tensor cores.
MIN_ROWS = 16


class DecodeBlocks(NamedTuple):
    """A tile has `block_kv` tokens; a row has up to `splits` programs a KV head, each of at least `min_tiles` tiles."""

    block_kv: int
    splits: int
    min_tiles: int
    num_warps: int
    num_stages: int


class _DecodeInputs(NamedTuple):
    num_decodes: Ref
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
    kv_lens: Array,
    num_decodes: Array,
    sinks: Array | None,
    attention: TritonAttention,
    blocks: DecodeBlocks,
    *,
    interpret: bool,
) -> Float[Array, "tokens heads head_dim"]:
    """Return the output of tokens `[0, num_decodes)`; the output of other tokens is not written."""
    tokens, heads, head_dim = q.shape
    rows = min(tokens, kv_lens.shape[0])
    inputs = _DecodeInputs(num_decodes.reshape(1), kv_lens, q, sinks)
    whole = jax.ShapeDtypeStruct(q.shape, q.dtype)
    out, partial = pl.pallas_call(
        functools.partial(_decode, attention=attention, blocks=blocks),
        grid=(blocks.splits, attention.kv_heads, rows),
        out_shape=(
            whole,
            _SplitOutputs(
                jax.ShapeDtypeStruct((rows, heads, blocks.splits, head_dim), jnp.float32),
                jax.ShapeDtypeStruct((rows, heads, blocks.splits), jnp.float32),
            ),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="paged_attention_decode",
    )(inputs, pool)
    return pl.pallas_call(
        functools.partial(_combine, attention=attention, blocks=blocks),
        grid=(heads, rows),
        out_shape=whole,
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="paged_attention_combine",
    )(out, inputs, partial)


def _tiles(length: Array, attention: TritonAttention, blocks: DecodeBlocks) -> tuple[Array, Array, Array]:
    """Return a row's first tile, its end, and the number of tiles of a split."""
    end = pl.cdiv(length, blocks.block_kv)
    first = jnp.int32(0)
    if attention.window is not None:
        first = lax.div(jnp.maximum(length - attention.window, 0), blocks.block_kv)
    return first, end, jnp.maximum(pl.cdiv(end - first, blocks.splits), blocks.min_tiles)


def _decode(
    rows: _DecodeInputs,
    pool: PoolRefs,
    out: Ref,
    partial: _SplitOutputs,
    *,
    attention: TritonAttention,
    blocks: DecodeBlocks,
) -> None:
    """Compute one split of a row and KV head. A row's only split writes the final output."""
    split, kv_head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    first, end, each = _tiles(rows.kv_lens[row], attention, blocks)
    at = first + split * each

    @pl.when((row < rows.num_decodes[0]) & (at < end))
    def run() -> None:
        state, head, live = _attend(rows, pool, row, kv_head, at, jnp.minimum(at + each, end), attention, blocks)
        value_scale = kv_scale(pool, 1, kv_head)

        @pl.when(end - first <= each)
        def store_whole() -> None:
            total = state.total
            if rows.sinks is not None:
                sink = plgpu.load(rows.sinks.at[head], mask=live, other=0.0) * LOG2E
                total = total + jnp.exp2(sink - state.peak)
            store_rows(out, (row, head), state.out * (value_scale / total)[:, None], live, attention)

        @pl.when(end - first > each)
        def store_part() -> None:
            done = state.out * (value_scale / state.total)[:, None]
            store_rows(partial.out, (row, head, split), done, live, attention)
            plgpu.store(partial.lse.at[row, head, split], state.peak + jnp.log2(state.total), mask=live)


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
    key_scale = kv_scale(pool, 0, kv_head)

    def tile_at(tile: Array) -> tuple[Array, Array]:
        position = tile * blocks.block_kv + lax.iota(jnp.int32, blocks.block_kv)
        held = position < length
        if attention.window is not None:
            held &= position >= length - attention.window
        return pool_rows(pool, row, kv_head, position, held, attention), held

    # Indices are looked up a tile ahead, so that loads of keys and values wait for no other load.
    def body(tile: Array, carry: tuple[SoftmaxState, tuple[Array, Array]]) -> tuple[SoftmaxState, tuple[Array, Array]]:
        state, (at, held) = carry
        keys = load_rows(pool.keys, (at,), held, attention)
        values = load_rows(pool.values, (at,), held, attention)
        return advance(state, q, keys, values, held[None, :], key_scale, attention), tile_at(tile + 1)

    state, _ = lax.fori_loop(first, end, body, (empty_softmax(size, attention.lanes), tile_at(first)))
    return state, head, live


def _combine(
    _: Ref, rows: _DecodeInputs, partial: _SplitOutputs, out: Ref, *, attention: TritonAttention, blocks: DecodeBlocks
) -> None:
    """Combine the splits of one head of a row, weighted by their shares of the softmax."""
    head, row = pl.program_id(0), pl.program_id(1)
    first, end, each = _tiles(rows.kv_lens[row], attention, blocks)

    @pl.when((row < rows.num_decodes[0]) & (end - first > each))
    def run() -> None:
        used = pl.cdiv(end - first, each)
        split = lax.iota(jnp.int32, pl.next_power_of_2(blocks.splits))
        lse = plgpu.load(partial.lse.at[row, head, split], mask=split < used, other=MASKED)
        peak = jnp.max(lse)
        total = jnp.sum(jnp.exp2(lse - peak))
        if rows.sinks is not None:
            total += jnp.exp2(rows.sinks[head] * LOG2E - peak)
        lane = lax.iota(jnp.int32, attention.lanes)
        has_lane = lane < attention.head_dim

        def body(i: Array, acc: Array) -> Array:
            part = plgpu.load(partial.out.at[row, head, i, lane], mask=has_lane, other=0.0)
            return acc + part * jnp.exp2(partial.lse[row, head, i] - peak)

        acc = lax.fori_loop(0, used, body, jnp.zeros((attention.lanes,), jnp.float32))
        plgpu.store(out.at[row, head, lane], (acc / total).astype(out.dtype), mask=has_lane)
