"""Calls the kernel of a CPU for packed weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.cpu import call
from pallas_kernels.grouped_matmul.cpu.kernel import GroupedMatmul
from pallas_kernels.grouped_matmul.epilogue import Epilogue
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.quantized_matmul import STRIP, PackedWeight
from pallas_kernels.quantized_matmul.cpu.inputs import round_inputs


def multiply_packed(
    x: Float[Array, "tokens_or_rows in_dim"],
    weight: PackedWeight,
    groups: Groups,
    epilogue: Epilogue,
    *,
    of_tokens: bool,
) -> Float32[Array, "rows out_or_half"]:
    """See `api.grouped_matmul`.

    The kernel multiplies bfloat16. Quantized inputs are rounded to numbers of int8 or fp8, which bfloat16 can hold.
    """
    assert weight.order is None, "experts with inputs in an order of their own are dequantized"
    assert x.shape[1] == weight.shape[-1], (x.shape, weight.shape)
    blocks, run = weight.data.shape[-2:]
    data = weight.data.reshape(groups.num_experts, -1, blocks, run)
    factors = None
    if weight.scheme is not None and weight.scheme.activations is not None:
        x, factors = round_inputs(x, weight.scheme, weight.input_scale)
    tokens = groups.tokens if of_tokens else jnp.arange(groups.num_rows, dtype=jnp.int32)
    operands = [x.astype(jnp.bfloat16), data, groups.starts, tokens]
    by_block = False
    if factors is not None and factors.shape[1] > 1:
        by_block = True
        operands.append(jnp.repeat(factors, blocks // factors.shape[1], axis=1))
    result = jax.ShapeDtypeStruct((groups.num_rows, data.shape[1] * STRIP), jnp.float32)
    sums = call(GroupedMatmul(weight.format, by_block), result, *operands)
    if factors is not None and not by_block:
        sums *= factors[tokens]
    return epilogue.apply(sums, groups)
