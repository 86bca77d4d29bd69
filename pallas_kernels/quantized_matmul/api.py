"""The public function."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantized_matmul.activations import quantize_inputs
from pallas_kernels.quantized_matmul.backends import BACKENDS
from pallas_kernels.quantized_matmul.cpu.backend import multiply_packed
from pallas_kernels.quantized_matmul.cpu.layout import PackedWeight
from pallas_kernels.quantized_matmul.layout import QuantizedWeight

HeldWeight = QuantizedWeight | PackedWeight


def quantized_matmul(
    x: Float[Array, "tokens in_dim"],
    weight: HeldWeight,
    *,
    out_dtype: Any = jnp.float32,
    one_pass: bool = False,
    num_rows: Int[Array, ""] | None = None,
) -> Float[Array, "tokens out_dim"]:
    """Return `x @ weight.T`, summed in float32; the scheme of the weight tells whether `x` is quantized first.

    `one_pass` says that no norm precedes with which XLA could join the quantization (see `quantize_inputs`). Only the
    first `num_rows` rows are needed, at least one: the others may hold anything, and a CPU leaves them out.
    """
    if isinstance(weight, PackedWeight):
        return multiply_packed(x, weight, out_dtype, num_rows)
    backend, scheme, rows, factors = weight.backend, weight.scheme, len(x), None
    if weight.order is not None:
        x = x[:, weight.order]
    if scheme.activations is not None:
        x, factors = quantize_inputs(x, scheme, weight.input_scale, backend, one_pass=one_pass)
    module = BACKENDS.module(backend.name)
    return module.multiply(x, factors, weight, out_dtype=out_dtype, backend=backend)[:rows].astype(out_dtype)
