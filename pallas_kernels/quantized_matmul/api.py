"""The public function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float

from pallas_kernels.cpu import call
from pallas_kernels.quantized_matmul.activations import quantize_inputs
from pallas_kernels.quantized_matmul.backends import backend_module
from pallas_kernels.quantized_matmul.cpu.kernel import PackedMatmul
from pallas_kernels.quantized_matmul.cpu.layout import BLOCK, STRIP, PackedWeight
from pallas_kernels.quantized_matmul.layout import QuantizedWeight


def quantized_matmul(
    x: Float[Array, "tokens in_dim"], weight: QuantizedWeight | PackedWeight, *, out_dtype: Any = jnp.float32
) -> Float[Array, "tokens out_dim"]:
    """Return `x @ weight.T`, summed in float32; the scheme of the weight tells whether `x` is quantized first."""
    if isinstance(weight, PackedWeight):
        return packed_matmul(x, weight).astype(out_dtype)
    factors = None
    if weight.order is not None:
        x = x[:, weight.order]
    if weight.scheme.activations is not None:
        x, factors = quantize_inputs(x, weight.scheme, weight.input_scale)
    options = {"out_dtype": out_dtype, "target": weight.backend.target, "interpret": weight.backend.interpret}
    return backend_module(weight.backend.name).multiply(x, factors, weight, **options).astype(out_dtype)


def packed_matmul(x: BFloat16[Array, "tokens in_dim"], weight: PackedWeight) -> Float[Array, "tokens out_dim"]:
    """Return `x @ weight.T` with float32 sums, on a CPU."""
    tokens, in_dim = x.shape
    strips, blocks, _ = weight.data.shape
    assert in_dim == blocks * BLOCK, (x.shape, weight.shape)
    out_dim = strips * STRIP
    return call(PackedMatmul(weight.bits), jax.ShapeDtypeStruct((tokens, out_dim), jnp.float32), x, weight.data)
