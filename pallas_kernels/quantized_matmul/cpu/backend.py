"""Calls the kernel of a CPU for a packed weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Shaped

from pallas_kernels.cpu import call
from pallas_kernels.quantized_matmul.cpu.kernel import PackedMatmul
from pallas_kernels.quantized_matmul.cpu.layout import STRIP, PackedWeight


def multiply_packed(
    x: Shaped[Array, "tokens in_dim"], factors: Float32[Array, "tokens groups"] | None, weight: PackedWeight
) -> Float32[Array, "tokens out_dim"]:
    """Return `x @ weight.T` with sums in float32; see `backends.BackendModule`.

    `x` is bfloat16, or rounded to int8 or fp8, which are exact in bfloat16 (`round_inputs`).
    """
    strips, blocks, _ = weight.data.shape
    assert x.shape[1] == weight.shape[-1], (x.shape, weight.shape)
    result = jax.ShapeDtypeStruct((len(x), strips * STRIP), jnp.float32)
    operands = x.astype(jnp.bfloat16), weight.data
    if factors is None or factors.shape[1] == 1:
        out = call(PackedMatmul(weight.format), result, *operands)
        return out if factors is None else out * factors
    by_block = jnp.repeat(factors, blocks // factors.shape[1], axis=1)
    return call(PackedMatmul(weight.format, factors=True), result, *operands, by_block)
