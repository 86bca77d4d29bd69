"""Quantizes rows on NVIDIA GPUs in one pass: a program keeps a row in registers while it looks for its scales."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Shaped

# A reference into device memory; jax has no public type for it.
Ref = Any

_WARP = 32
_VALUES_A_THREAD = 16
_MOST_WARPS = 16
# Adding it rounds a float32 to a whole number, half to even: the difference of their bits, as integers. A difference of
# floats would be simplified by XLA, which interprets the kernel on a CPU.
_ROUNDING = np.float32(1.5 * 2**23)


def quantize_rows(
    x: Float[Array, "tokens in_dim"],
    rows: int,
    group: int,
    dtype: Any,
    largest: float,
    smallest_scale: float,
    *,
    interpret: bool,
) -> tuple[Shaped[Array, "rows in_dim"], Float32[Array, "rows groups"]]:
    """Return `x` divided by the scales of its groups in `dtype`, in which no number exceeds `largest`, and the scales.

    Rows beyond those of `x` repeat its last one. See `activations.quantize_inputs`.
    """
    inputs = x.shape[1]
    tile = pl.next_power_of_2(inputs // group), pl.next_power_of_2(group)
    warps = min(_MOST_WARPS, max(1, tile[0] * tile[1] // (_WARP * _VALUES_A_THREAD)))
    numbers, scales = pl.pallas_call(
        functools.partial(_kernel, group=group, tile=tile, largest=largest, smallest_scale=smallest_scale),
        grid=(rows,),
        out_shape=(
            jax.ShapeDtypeStruct((rows, inputs), dtype),
            # The scales are in the order in which products of groups read them.
            jax.ShapeDtypeStruct((inputs // group, rows), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="quantize_inputs",
    )(x)
    return numbers, scales.T


def _kernel(
    x: Ref, numbers: Ref, scales: Ref, *, group: int, tile: tuple[int, int], largest: float, smallest_scale: float
) -> None:
    row, (tokens, inputs) = pl.program_id(0), x.shape
    of, lane = (lax.broadcasted_iota(jnp.int32, tile, i) for i in range(2))
    at, mask = of * group + lane, (lane < group) & (of * group < inputs)
    values = plgpu.load(x.at[jnp.minimum(row, tokens - 1), at], mask=mask, other=0.0).astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(values).max(axis=1) / largest, smallest_scale)
    scaled = jnp.clip(values / scale[:, None], -largest, largest)
    if numbers.dtype == jnp.int8:
        scaled = lax.bitcast_convert_type(scaled + _ROUNDING, jnp.int32) - _ROUNDING.view(np.int32)
    plgpu.store(numbers.at[row, at], scaled.astype(numbers.dtype), mask=mask)
    groups = lax.iota(jnp.int32, tile[0])
    plgpu.store(scales.at[groups, row], scale, mask=groups * group < inputs)
