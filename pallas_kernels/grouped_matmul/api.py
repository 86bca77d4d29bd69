"""The public function."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.grouped_matmul.backends import BACKENDS
from pallas_kernels.grouped_matmul.cpu.backend import multiply_packed
from pallas_kernels.grouped_matmul.epilogue import Epilogue
from pallas_kernels.grouped_matmul.gate import Gate
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.quantized_matmul import Backend, HeldWeight, PackedWeight, QuantizedWeight
from pallas_kernels.quantized_matmul.activations import quantize_inputs
from pallas_kernels.target import KernelTarget


def grouped_matmul(
    x: Float[Array, "tokens_or_rows in_dim"],
    weight: Float[Array, "experts *out in_dim"] | HeldWeight,
    groups: Groups,
    *,
    bias: Float[Array, "experts out_dim"] | None = None,
    gate: Gate | None = None,
    of_tokens: bool = False,
    out_dtype: Any = jnp.float32,
    target: KernelTarget,
    backend: Backend | None = None,
    one_pass: bool = False,
) -> Float[Array, "rows out_or_half"]:
    """Multiply each row by the weight of its expert, `x @ weight[expert].T + bias[expert]`, summed in float32.

    The dimensions `out` count as one. `x` are rows as in `groups`, or, with `of_tokens`, tokens, of which each is the
    input of all its rows. With a `gate`, the first half of the outputs are those of the gate matrix, the others those
    of the up matrix, and the result joins both (`Gate.join`). Experts without rows are not read, and a row
    doesn't depend on other rows.

    `backend` multiplies by weights of 16 bits, by default the one chosen for `target`; a quantized weight has its own.
    `one_pass` says that no norm precedes (see `quantize_inputs`).
    """
    epilogue = Epilogue(bias, gate)
    if isinstance(weight, PackedWeight):
        return multiply_packed(x, weight, groups, epilogue, of_tokens=of_tokens).astype(out_dtype)
    weight = weight.reshape(groups.num_experts, -1, x.shape[1])
    factors = None
    if isinstance(weight, QuantizedWeight):
        assert weight.order is None, "experts with inputs in an order of their own are dequantized"
        backend, scheme = weight.backend, weight.scheme
        if scheme.activations is not None:
            rows = len(x)
            x, factors = quantize_inputs(x, scheme, weight.input_scale, backend, one_pass=one_pass)
            x, factors = x[:rows], factors[:rows]
    elif backend is None:
        backend = BACKENDS.choose(target, (*weight.shape[1:], None))
    options: dict[str, Any] = {"of_tokens": of_tokens, "out_dtype": out_dtype, "backend": backend}
    return BACKENDS.module(backend.name).multiply(x, factors, weight, groups, epilogue, **options).astype(out_dtype)
