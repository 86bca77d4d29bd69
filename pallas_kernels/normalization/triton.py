"""A residual sum and the RMS norm of it as one kernel for NVIDIA GPUs; one program a row."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

_NUMBERS_A_WARP = 512
_MAX_WARPS = 16

# A reference into device memory; jax has no public type for it.
_Ref = Any


def add_rms_norm(
    x: Float[Array, "rows dim"],
    delta: Float[Array, "rows dim"] | Float[Array, "parts rows dim"],
    weight: Float[Array, " dim"],
    eps: float,
    *,
    interpret: bool,
) -> tuple[Float[Array, "rows dim"], Float[Array, "rows dim"]]:
    """Return `x + delta`, and that sum scaled to unit mean square, in float32, then by `weight` in `x`'s dtype.

    With three dimensions, the parts of `delta` are added first, and their sum is rounded to `x`'s dtype.
    """
    rows, dim = x.shape
    warps = min(_MAX_WARPS, max(1, pl.next_power_of_2(dim) // _NUMBERS_A_WARP))
    whole = jax.ShapeDtypeStruct(x.shape, x.dtype)
    total, normed = pl.pallas_call(
        functools.partial(_add_rms_norm, eps=eps),
        grid=(rows,),
        out_shape=(whole, whole),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="add_rms_norm",
    )(x, delta if delta.ndim == 3 else delta[None], weight)
    return total, normed


def _add_rms_norm(x: _Ref, delta: _Ref, weight: _Ref, total: _Ref, normed: _Ref, *, eps: float) -> None:
    row, dim, dtype = pl.program_id(0), x.shape[1], x.dtype
    lane = lax.iota(jnp.int32, pl.next_power_of_2(dim))
    mask = lane < dim

    def load(ref: _Ref, *at: Any) -> Array:
        return plgpu.load(ref.at[(*at, lane)], mask=mask, other=0.0).astype(jnp.float32)

    def rounded(x: Array) -> Array:
        return x.astype(dtype).astype(jnp.float32)

    parts = [load(delta, part, row) for part in range(delta.shape[0])]
    wide = rounded(load(x, row) + rounded(functools.reduce(jnp.add, parts)))
    plgpu.store(total.at[row, lane], wide.astype(dtype), mask=mask)
    scaled = rounded(wide * lax.rsqrt(jnp.sum(wide * wide) / dim + eps))
    plgpu.store(normed.at[row, lane], (scaled * load(weight)).astype(dtype), mask=mask)
