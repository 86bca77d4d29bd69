"""The kernel of the TPU backend: a step of its grid computes a tile of queries of one head.

Tiles are of all tokens, whatever their texts: a tile takes those tiles of keys that any of its queries sees, and a mask
keeps texts apart. The keys and values of a head stay in vector memory for all of its tiles.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

TILE = 128
_MASKED = -1e30

# A reference to memory inside a kernel.
Ref = Any


def attend(
    q: Float[Array, "heads rows lanes"],
    k: Float[Array, "kv_heads rows lanes"],
    v: Float[Array, "kv_heads rows lanes"],
    seen: Int[Array, "rows two"],
    *,
    scale: float,
    soft_cap: float | None,
    vmem_limit: int,
    interpret: bool,
) -> Float[Array, "heads rows lanes"]:
    """Return the output of all tokens; zeros for those that see none. Rows are whole tiles of tokens."""
    heads, rows, lanes = q.shape
    group = heads // len(k)
    by_tile = seen.reshape(-1, TILE, 2)
    stops = -(-by_tile[:, :, 1].max(axis=1) // TILE)
    sees_any = by_tile[:, :, 1] > 0
    firsts = jnp.where(sees_any, by_tile[:, :, 0], rows).min(axis=1) // TILE
    tile = pl.BlockSpec((None, TILE, lanes), lambda h, i, *_: (h, i, 0))
    whole = pl.BlockSpec((None, rows, lanes), lambda h, i, *_: (h // group, 0, 0))
    return pl.pallas_call(
        functools.partial(_kernel, scale=scale, soft_cap=soft_cap),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(heads, rows // TILE),
            in_specs=[tile, whole, whole, pl.BlockSpec((None, TILE, 2), lambda h, i, *_: (i, 0, 0))],
            out_specs=tile,
        ),
        interpret=pltpu.InterpretParams(detect_races=True) if interpret else False,
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=vmem_limit, dimension_semantics=("arbitrary", "arbitrary")
        ),
        name="packed_attention_tpu",
    )(firsts, stops, q, k, v, by_tile)


def _kernel(
    firsts: Ref,
    stops: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    seen: Ref,
    out: Ref,
    *,
    scale: float,
    soft_cap: float | None,
) -> None:
    i = pl.program_id(1)
    q, first, stop = q_ref[...], seen[:, :1], seen[:, 1:]
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def dot(a: Array, b: Array, axis: int) -> Array:
        dims = (((1,), (axis,)), ((), ()))
        return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)

    def step(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        sums, old, total = state
        at = pl.multiple_of(j * TILE, TILE)
        keys, values = (ref[pl.ds(at, TILE)] for ref in (k_ref, v_ref))
        logits = dot(q, keys, 1) * scale
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        key = at + lax.broadcasted_iota(jnp.int32, (TILE, TILE), 1)
        sees = (key >= first) & (key < stop)
        logits = jnp.where(sees, logits, _MASKED)
        peak = jnp.maximum(old, jnp.max(logits, axis=1, keepdims=True))
        weights = jnp.where(sees, jnp.exp(logits - peak), 0.0)
        keep = jnp.exp(old - peak)
        total = total * keep + jnp.sum(weights, axis=1, keepdims=True)
        return sums * keep + dot(weights.astype(q.dtype), values, 0), peak, total

    column = jnp.zeros((TILE, 1), jnp.float32)
    empty = jnp.zeros(q.shape, jnp.float32), column + _MASKED, column
    sums, _, total = lax.fori_loop(firsts[i], stops[i], step, empty)
    out[...] = (sums / jnp.where(total > 0, total, 1.0)).astype(out.dtype)
