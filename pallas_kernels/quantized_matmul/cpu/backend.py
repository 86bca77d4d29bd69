"""Calls the kernel of a CPU for a packed weight."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cpu import call
from pallas_kernels.quantized_matmul.cpu.inputs import round_inputs
from pallas_kernels.quantized_matmul.cpu.kernel import PackedMatmul
from pallas_kernels.quantized_matmul.cpu.layout import STRIP, PackedWeight
from pallas_kernels.quantized_matmul.cpu.reorder import reorder_inputs


def multiply_packed(
    x: Float[Array, "tokens in_dim"],
    weight: PackedWeight,
    out_dtype: Any = jnp.float32,
    num_rows: Int[Array, ""] | None = None,
) -> Float[Array, "tokens out_dim"]:
    """Return `x @ weight.T` with sums in float32; see `quantized_matmul`.

    The kernel multiplies bfloat16. Quantized inputs are rounded to numbers of int8 or fp8, which bfloat16 can hold.
    """
    strips, blocks, _ = weight.data.shape
    factors = None
    if weight.order is not None:
        x = reorder_inputs(x, weight.order)
    if weight.scheme is not None and weight.scheme.activations is not None:
        x, factors = round_inputs(x, weight.scheme, weight.input_scale)
    assert x.shape[1] == weight.shape[-1], (x.shape, weight.shape)
    by_row = factors if factors is not None and factors.shape[1] == 1 else None
    # The kernel rounds a result that is not multiplied further: XLA's conversion would take as long as a small product.
    rounds = out_dtype == jnp.bfloat16 and by_row is None
    result = jax.ShapeDtypeStruct((len(x), strips * STRIP), jnp.bfloat16 if rounds else jnp.float32)
    num_rows = jnp.int32(len(x)) if num_rows is None else num_rows
    operands = [x.astype(jnp.bfloat16), weight.data, num_rows]
    if factors is not None and by_row is None:
        operands.append(jnp.repeat(factors, blocks // factors.shape[1], axis=1))
    out = call(PackedMatmul(weight.format, factors=len(operands) > 3, rounds=rounds), result, *operands)
    return (out if by_row is None else out * by_row).astype(out_dtype)
