"""The Triton kernel: a work list of query tiles, each over the tokens of its text that it sees.

A tile has some queries of one text with all query heads of one KV head, as in paged attention's prefill. A tile sees
about as many tokens as any other of its text, so their order doesn't matter.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.packed_attention.arguments import Texts
from pallas_kernels.paged_attention.triton.prefill import PrefillBlocks
from pallas_kernels.paged_attention.triton.tiles import (
    HeadSpan,
    Ref,
    SoftmaxState,
    advance,
    empty_softmax,
    load_rows,
    store_rows,
)
from pallas_kernels.paged_attention.triton.work_list import WorkList, for_each_item, num_programs, work_list


@dataclasses.dataclass(frozen=True)
class TritonPacked:
    """The static facts of a call."""

    kv_heads: int
    group: int
    head_dim: int
    scale: float
    reach: int | None
    soft_cap: float | None
    interpret: bool


class _PackedInputs(NamedTuple):
    q: Ref
    k: Ref
    v: Ref
    starts: Ref
    bias: Ref | None


def attend(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    texts: Texts,
    bias: Float[Array, "heads distances"] | None,
    facts: TritonPacked,
    blocks: PrefillBlocks,
) -> Float[Array, "tokens heads head_dim"]:
    """Return the output of the tokens of all texts; that of padding isn't written."""
    tokens, tile = len(q), blocks.block_q // facts.group
    lengths = texts.starts[1:] - texts.starts[:-1]
    lengths = jnp.where(jnp.arange(len(lengths), dtype=jnp.int32) < texts.num_texts, lengths, 0)
    work = work_list(pl.cdiv(lengths, tile), lengths, tokens // tile + min(len(lengths), tokens))
    programs = num_programs(work, facts.kv_heads, blocks.programs, interpret=facts.interpret)
    return pl.pallas_call(
        functools.partial(_kernel, facts=facts, blocks=blocks, programs=programs),
        grid=(programs,),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=facts.interpret,
        name="packed_attention",
    )(work, _PackedInputs(q, k, v, texts.starts, bias))


def _kernel(
    work: WorkList, inputs: _PackedInputs, out: Ref, *, facts: TritonPacked, blocks: PrefillBlocks, programs: int
) -> None:
    group, block, reach, span = facts.group, blocks.block_kv, facts.reach, HeadSpan(0, facts.head_dim)
    queries = blocks.block_q // group

    def compute(text: Array, part: Array, kv_head: Array) -> None:
        start, stop = inputs.starts[text], inputs.starts[text + 1]
        first = start + part * queries
        pair = lax.iota(jnp.int32, blocks.block_q)
        token, head = first + lax.div(pair, group), kv_head * group + lax.rem(pair, group)
        live = (token < stop) & (pair < queries * group)
        q = load_rows(inputs.q, (token, head), live, span)
        begin, end = start, stop
        if reach is not None:
            begin, end = jnp.maximum(start, first - reach), jnp.minimum(stop, first + queries + reach)

        def step(i: Array, state: SoftmaxState, *, masked: bool) -> SoftmaxState:
            key = begin + i * block + lax.iota(jnp.int32, block)
            distance = key[None, :] - token[:, None]
            seen = None
            if masked:
                seen = jnp.broadcast_to(key[None, :] < end, distance.shape)
                if reach is not None:
                    seen &= jnp.abs(distance) <= reach
                # Tokens of no text may be NaN: others are read in their place.
                key = jnp.minimum(key, end - 1)
            keys, values = (load_rows(ref, (key, kv_head), None, span) for ref in (inputs.k, inputs.v))
            bias = None
            if inputs.bias is not None:
                far = inputs.bias.shape[1] // 2
                bias = plgpu.load(inputs.bias.at[head[:, None], jnp.clip(distance, -far, far) + far])
            return advance(state, (q,), (keys,), (values,), seen, 1.0, facts, bias)

        # Tiles that all queries see whole need no masks; within a reach there are few of these.
        masks_all = reach is not None or blocks.masks_all
        whole = jnp.int32(0) if masks_all else lax.div(end - begin, block)
        state = empty_softmax(blocks.block_q, (span,))
        if not masks_all:
            state = lax.fori_loop(0, whole, functools.partial(step, masked=False), state)
        state = lax.fori_loop(whole, pl.cdiv(end - begin, block), functools.partial(step, masked=True), state)
        # A pair that isn't live may have seen nothing, but it isn't written either.
        store_rows(out, (token, head), state.out[0] / state.total[:, None], live, span)

    for_each_item(work, facts.kv_heads, programs, compute)
