"""Calls the kernel of a CPU for a packed weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.cpu import call
from pallas_kernels.quantized_matmul.cpu.inputs import round_inputs
from pallas_kernels.quantized_matmul.cpu.kernel import PackedMatmul
from pallas_kernels.quantized_matmul.cpu.layout import STRIP, PackedWeight
from pallas_kernels.quantized_matmul.cpu.reorder import reorder_inputs


def multiply_packed(x: Float[Array, "tokens in_dim"], weight: PackedWeight) -> Float32[Array, "tokens out_dim"]:
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
    result = jax.ShapeDtypeStruct((len(x), strips * STRIP), jnp.float32)
    operands = x.astype(jnp.bfloat16), weight.data
    if factors is None or factors.shape[1] == 1:
        out = call(PackedMatmul(weight.format), result, *operands)
        return out if factors is None else out * factors
    by_block = jnp.repeat(factors, blocks // factors.shape[1], axis=1)
    return call(PackedMatmul(weight.format, factors=True), result, *operands, by_block)
