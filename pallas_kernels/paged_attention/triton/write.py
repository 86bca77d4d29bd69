"""KV write on Triton: one kernel writes new keys and values, or latent rows, into their pages in place."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.layout import PagedKV
from pallas_kernels.paged_attention.problem import is_float8, largest_float8
from pallas_kernels.paged_attention.triton.tiles import Ref, TritonAttention, flat, load_rows, store_rows

TOKENS = 16


class _NewTokens(NamedTuple):
    rows: tuple[Ref, ...]
    slots: Ref
    scales: Ref | None
    layer: Ref


def write(
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"] | None,
    kv: PagedKV,
    layer: Int[Array, " 1"],
    slots: Int[Array, " tokens"],
    attention: TritonAttention,
) -> tuple[PagedKV, Int[Array, "tokens items"]]:
    """Return the pool with each token in its slot of the layer, and zeros for decode, which save it another launch.

    There is a zero for each KV head of `attention`. Tokens of negative slots are not written.
    """
    pools, rows = tuple(flat(pool) for pool in kv.pools), (k,) if v is None else (k, v)
    written, zeros = pl.pallas_call(
        functools.partial(_write, attention=attention),
        grid=(k.shape[1], pl.cdiv(k.shape[0], TOKENS)),
        out_shape=(
            tuple(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools),
            jax.ShapeDtypeStruct((k.shape[0], attention.kv_heads), jnp.int32),
        ),
        input_output_aliases={i: i for i in range(len(pools))},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=attention.interpret,
        name="paged_attention_write",
    )(pools, _NewTokens(rows, slots, kv.scales, layer))
    return kv.with_pools([pool.reshape(old.shape) for pool, old in zip(written, kv.pools, strict=True)]), zeros


def _write(
    _: tuple[Ref, ...], new: _NewTokens, pools: tuple[Ref, ...], zeros: Ref, *, attention: TritonAttention
) -> None:
    kv_head, layer = pl.program_id(0), new.layer[0]
    token = pl.program_id(1) * TOKENS + lax.iota(jnp.int32, TOKENS)
    there = token < new.slots.shape[0]
    for item in (kv_head,) if attention.value_dim is None else range(attention.kv_heads):
        plgpu.store(zeros.at[token, item], jnp.zeros((TOKENS,), jnp.int32), mask=there)
    slot = plgpu.load(new.slots.at[token], mask=there, other=-1)
    live = slot >= 0
    at = (kv_head * attention.entries + layer * attention.num_pages) * attention.page_size + slot
    at = jnp.where(live, at, pools[0].shape[0])
    for which, (source, pool) in enumerate(zip(new.rows, pools, strict=True)):
        rows = load_rows(source, (token, kv_head), live, attention.head)
        scale = None if new.scales is None else new.scales[which, layer, kv_head]
        store_rows(pool, (at,), to_pool(rows, scale, pool.dtype), live, attention.head)


def to_pool(rows: Float[Array, "tokens lanes"], scale: Array | None, dtype: jnp.dtype) -> Float[Array, "tokens lanes"]:
    """Convert keys or values to the pool's dtype; for fp8, they are divided by their scale and clipped."""
    if scale is not None:
        rows = rows.astype(jnp.float32) / scale
    if is_float8(dtype):
        rows = jnp.clip(rows, -largest_float8(dtype), largest_float8(dtype))
    return rows.astype(dtype)
