"""The public function."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.quantized_matmul.activations import quantize_inputs
from pallas_kernels.quantized_matmul.backends import backend_module
from pallas_kernels.quantized_matmul.cpu.backend import multiply_packed
from pallas_kernels.quantized_matmul.cpu.inputs import round_inputs
from pallas_kernels.quantized_matmul.cpu.layout import PackedWeight
from pallas_kernels.quantized_matmul.cpu.reorder import reorder_inputs
from pallas_kernels.quantized_matmul.layout import QuantizedWeight

HeldWeight = QuantizedWeight | PackedWeight


def quantized_matmul(
    x: Float[Array, "tokens in_dim"], weight: HeldWeight, *, out_dtype: Any = jnp.float32
) -> Float[Array, "tokens out_dim"]:
    """Return `x @ weight.T`, summed in float32; the scheme of the weight tells whether `x` is quantized first."""
    factors = None
    if weight.order is not None:
        x = reorder_inputs(x, weight.order) if isinstance(weight, PackedWeight) else x[:, weight.order]
    if weight.scheme is not None and weight.scheme.activations is not None:
        quantize = round_inputs if isinstance(weight, PackedWeight) else quantize_inputs
        x, factors = quantize(x, weight.scheme, weight.input_scale)
    if isinstance(weight, PackedWeight):
        return multiply_packed(x, factors, weight).astype(out_dtype)
    options = {"out_dtype": out_dtype, "target": weight.backend.target, "interpret": weight.backend.interpret}
    return backend_module(weight.backend.name).multiply(x, factors, weight, **options).astype(out_dtype)
