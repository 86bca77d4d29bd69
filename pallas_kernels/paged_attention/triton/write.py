"""KV write on Triton: one kernel writes new keys and values into their pages in place."""

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
    keys: Ref
    values: Ref
    slots: Ref
    scales: Ref | None
    layer: Ref


def write(
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    kv: PagedKV,
    layer: Int[Array, " 1"],
    slots: Int[Array, " tokens"],
    attention: TritonAttention,
) -> tuple[PagedKV, Int[Array, "tokens kv_heads"]]:
    """Return the pool with each token in its slot of the layer, and zeros for decode, which save it another launch.

    Tokens of negative slots are not written.
    """
    pools = flat(kv.keys), flat(kv.values)
    keys, values, zeros = pl.pallas_call(
        functools.partial(_write, attention=attention),
        grid=(attention.kv_heads, pl.cdiv(k.shape[0], TOKENS)),
        out_shape=(
            *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools),
            jax.ShapeDtypeStruct(k.shape[:2], jnp.int32),
        ),
        input_output_aliases={0: 0, 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=attention.interpret,
        name="paged_attention_write",
    )(*pools, _NewTokens(k, v, slots, kv.scales, layer))
    return kv.with_pools([keys.reshape(kv.keys.shape), values.reshape(kv.values.shape)]), zeros


def _write(
    _keys: Ref, _values: Ref, new: _NewTokens, keys: Ref, values: Ref, zeros: Ref, *, attention: TritonAttention
) -> None:
    kv_head, layer = pl.program_id(0), new.layer[0]
    token = pl.program_id(1) * TOKENS + lax.iota(jnp.int32, TOKENS)
    there = token < new.slots.shape[0]
    plgpu.store(zeros.at[token, kv_head], jnp.zeros((TOKENS,), jnp.int32), mask=there)
    slot = plgpu.load(new.slots.at[token], mask=there, other=-1)
    live = slot >= 0
    at = (kv_head * attention.entries + layer * attention.num_pages) * attention.page_size + slot
    at = jnp.where(live, at, keys.shape[0])
    for which, (source, pool) in enumerate(((new.keys, keys), (new.values, values))):
        rows = load_rows(source, (token, kv_head), live, attention)
        scale = None if new.scales is None else new.scales[which, layer, kv_head]
        store_rows(pool, (at,), to_pool(rows, scale, pool.dtype), live, attention)


def to_pool(rows: Float[Array, "tokens lanes"], scale: Array | None, dtype: jnp.dtype) -> Float[Array, "tokens lanes"]:
    """Convert keys or values to the pool's dtype; for fp8, they are divided by their scale and clipped."""
    if scale is not None:
        rows = rows.astype(jnp.float32) / scale
    if is_float8(dtype):
        rows = jnp.clip(rows, -largest_float8(dtype), largest_float8(dtype))
    return rows.astype(dtype)
