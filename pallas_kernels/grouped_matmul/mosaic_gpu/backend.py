"""The Mosaic GPU backend: Hopper GPUs, with their copy engine and warpgroup products, by Pallas' own GPU lowering.

Numbers of every scheme are multiplied by bfloat16; int8 and fp8 also by inputs that are quantized. Inputs and weights
of other float types go to the reference: engines on these GPUs run in bfloat16.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Shaped

from pallas_kernels.dispatch import Backend
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.epilogue import Epilogue
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.grouped_matmul.mosaic_gpu.kernel import MosaicGpuGroupedMatmul
from pallas_kernels.grouped_matmul.mosaic_gpu.plan import make_plan
from pallas_kernels.quantized_matmul import QuantizedWeight, Scheme
from pallas_kernels.quantized_matmul.mosaic_gpu import backend as products
from pallas_kernels.quantized_matmul.mosaic_gpu.backend import unpacking_of
from pallas_kernels.quantized_matmul.mosaic_gpu.plan import BLOCK
from pallas_kernels.quantized_matmul.mosaic_gpu.unpack import TILE_ROWS
from pallas_kernels.target import KernelTarget

_CORES = 132
# The interpreter runs programs one after another: few of them, so that each takes several tiles.
_INTERPRETED_CORES = 2
_INPUTS = 64
# Strides of copies are multiples of 16 bytes.
_FACTORS = 4


def refusal(out_dim: int, in_dim: int, scheme: Scheme | None, target: KernelTarget) -> str | None:
    """See `backends.ExpertsModule`."""
    # A product of these sizes is refused only for its scheme.
    refused = products.refusal(TILE_ROWS, BLOCK, scheme or Scheme("int8"), target)
    if refused is not None:
        return refused
    unit = _INPUTS
    if scheme is not None and scheme.activations is None:
        unit = max(unit, len(products.arrangement(in_dim, scheme, target)))
    if out_dim % TILE_ROWS or in_dim % unit:
        return f"mosaic_gpu takes multiples of {TILE_ROWS} outputs and {unit} inputs, not {out_dim} and {in_dim}"
    return None


def multiply(
    x: Shaped[Array, "tokens_or_rows in_dim"],
    factors: Float32[Array, "tokens_or_rows groups"] | None,
    weight: Float[Array, "experts out_dim in_dim"] | QuantizedWeight,
    groups: Groups,
    epilogue: Epilogue,
    *,
    of_tokens: bool,
    out_dtype: Any,
    backend: Backend,
) -> Float[Array, "rows out_or_half"]:
    """See `backends.ExpertsModule`."""
    options: dict[str, Any] = {"of_tokens": of_tokens, "backend": backend}
    target, interpret, bias, gate = backend.target, backend.interpret, epilogue.bias, epilogue.gate
    experts, out_dim, in_dim = weight.shape
    numbers: Any = weight
    scheme, scale, zero, unpacking = None, None, None, None
    if isinstance(weight, QuantizedWeight):
        scheme, numbers, scale, zero = weight.scheme, weight.numbers, weight.scale, weight.zero
    if (factors is None and x.dtype != jnp.bfloat16) or (scheme is None and numbers.dtype != jnp.bfloat16):
        return reference.multiply(x, factors, weight, groups, epilogue, out_dtype=out_dtype, **options)
    if gate is not None and out_dim % (2 * TILE_ROWS):
        # The outputs of each matrix can't be divided into tiles.
        sums = multiply(x, factors, weight, groups, Epilogue(), out_dtype=jnp.float32, **options)
        return epilogue.apply(sums, groups)
    group = (scheme.group if scheme else None) or in_dim
    in_place = group == in_dim
    if scheme is not None and scheme.activations is None:
        unpacking = unpacking_of(in_dim, scheme)
        numbers = lax.bitcast_convert_type(numbers.reshape(experts * out_dim, -1, 4), jnp.uint32)
        if zero is not None and zero.dtype != jnp.int16:
            factors = x.astype(jnp.float32).reshape(len(x), -1, unpacking.group).sum(axis=-1)
            in_place = False
    elif scheme is not None:
        # The tensor cores' sums of products of fp8 lose bits if they are long.
        in_place = in_place and scheme.numbers == "int8"
    if of_tokens:
        x, factors = x[groups.tokens], None if factors is None else factors[groups.tokens]
    out_dtype = jnp.bfloat16 if out_dtype == jnp.bfloat16 else jnp.float32
    plan = make_plan(
        out_dim // 2 if gate else out_dim,
        in_dim,
        (groups.likely_rows, groups.num_rows),
        experts,
        _INTERPRETED_CORES if interpret else target.cores or _CORES,
        scheme,
        in_place=in_place,
        gated=gate is not None,
        out_bytes=jnp.dtype(out_dtype).itemsize,
    )
    row_factors = None
    if factors is not None and unpacking is None:
        if factors.shape[1] == 1:
            row_factors, factors = jnp.pad(factors[:, 0], (0, plan.tokens)), None
        else:
            # The kernel takes a factor for each block; a group may have several blocks.
            factors = jnp.repeat(factors, in_dim // plan.block // factors.shape[1], axis=1)
    if factors is not None:
        factors = jnp.pad(factors.T, ((0, 0), (0, -len(x) % _FACTORS)))
    numbers, scale, zero = (
        None if one is None else one.reshape(experts * out_dim, -1) for one in (numbers, scale, zero)
    )
    offsets = None if bias is None else bias.reshape(-1)
    kernel = MosaicGpuGroupedMatmul(plan, group, unpacking, in_place, gate, interpret)
    return kernel.multiply(groups.starts, x, factors, row_factors, numbers, scale, zero, offsets, out_dtype)
