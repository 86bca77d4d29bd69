"""The public function."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.quantized_matmul.activations import quantize_inputs
from pallas_kernels.quantized_matmul.backends import Backend, backend_module
from pallas_kernels.quantized_matmul.cpu.backend import multiply_packed
from pallas_kernels.quantized_matmul.cpu.layout import PackedWeight
from pallas_kernels.quantized_matmul.cpu.reorder import reorder_inputs
from pallas_kernels.quantized_matmul.layout import QuantizedWeight

HeldWeight = QuantizedWeight | PackedWeight


def quantized_matmul(
    x: Float[Array, "tokens in_dim"], weight: HeldWeight, *, out_dtype: Any = jnp.float32, one_pass: bool = False
) -> Float[Array, "tokens out_dim"]:
    """Return `x @ weight.T`, summed in float32; the scheme of the weight tells whether `x` is quantized first.

    `one_pass` says that no norm precedes, with which XLA joins that (see `quantize_inputs`).
    """
    factors, rows = None, len(x)
    if weight.order is not None:
        x = reorder_inputs(x, weight.order) if isinstance(weight, PackedWeight) else x[:, weight.order]
    if weight.scheme is not None and weight.scheme.activations is not None:
        backend = weight.backend if isinstance(weight, QuantizedWeight) else Backend()
        x, factors = quantize_inputs(x, weight.scheme, weight.input_scale, backend, one_pass=one_pass)
    if isinstance(weight, PackedWeight):
        return multiply_packed(x, factors, weight).astype(out_dtype)
    options = {"out_dtype": out_dtype, "target": weight.backend.target, "interpret": weight.backend.interpret}
    out = backend_module(weight.backend.name).multiply(x, factors, weight, **options)
    return out[:rows].astype(out_dtype)
