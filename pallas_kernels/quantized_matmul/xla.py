"""The XLA backend: schemes whose numbers XLA multiplies as they are, with scales applied to the sums.

It takes numbers of 8 bits with one scale for each output. On GPUs inputs must be quantized: then XLA calls cuBLASLt or
writes a kernel for the tensor cores. If inputs aren't quantized, a TPU's compiler converts the numbers in the product.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Shaped

from pallas_kernels.dispatch import Backend
from pallas_kernels.quantized_matmul.layout import FP8, QuantizedWeight
from pallas_kernels.quantized_matmul.scheme import Scheme
from pallas_kernels.target import KernelTarget

# The fewest rows of a matrix product on a TPU, and of cuBLASLt's product of fp8. With one row, XLA multiplies and adds
# outside of a TPU's matrix units, which takes ten times as long; on a GPU it converts the weight.
_MIN_ROWS = 8

# cuBLASLt's products of 8 bits take multiples of this; XLA would copy others into a larger array.
_MULTIPLE = 16


def refusal(out_dim: int, in_dim: int, scheme: Scheme, target: KernelTarget) -> str | None:
    """See `backends.ProductModule`."""
    if scheme.bits == 4 or scheme.group is not None:
        return "xla takes numbers of 8 bits with one scale for each output: it would write out other weights in memory"
    if target.platform in ("cuda", "gpu"):
        if scheme.activations is None:
            return "xla takes only quantized inputs on GPUs: else it may choose to write out the weight in 16 bits"
        if scheme.numbers == "fp8" and not target.multiplies_fp8:
            return (
                f"xla takes fp8 on NVIDIA GPUs of compute capability 8.9 (Ada) or newer, not on "
                f"{target.kind or 'this one'}: it would write out the weight in 16 bits"
            )
        if out_dim % _MULTIPLE or in_dim % _MULTIPLE:
            return f"xla takes quantized inputs and outputs in multiples of {_MULTIPLE}, not {in_dim} and {out_dim}"
    return None


def multiply(
    x: Shaped[Array, "tokens in_dim"],
    factors: Float32[Array, "tokens groups"] | None,
    weight: QuantizedWeight,
    *,
    out_dtype: Any,
    backend: Backend,
) -> Float32[Array, "tokens out_dim"]:
    """See `backends.ProductModule`."""
    target = backend.target
    rows, inputs = x.shape
    if rows < _MIN_ROWS and (factors is not None or target.platform == "tpu"):
        padding = ((0, _MIN_ROWS - rows), (0, 0))
        x, factors = jnp.pad(x, padding), None if factors is None else jnp.pad(factors, padding)
    numbers = weight.numbers.reshape(-1, inputs)
    if factors is None:
        # XLA's CPU doesn't sum all products of bfloat16 in float32.
        x = x.astype(jnp.float32) if target.platform == "cpu" else x
        numbers = numbers.astype(x.dtype)
    # By default, cuBLASLt sums products of fp8 in about 14 bits on Hopper.
    precision = lax.Precision.HIGHEST if x.dtype in (jnp.float32, FP8) else None
    sum_dtype = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    if x.dtype == FP8 and out_dtype == jnp.bfloat16 and target.platform in ("cuda", "gpu"):
        # cuBLASLt scales neither rows nor outputs. The kernel that does reads the sums, which are the most bytes of a
        # prefill's product. Rounding them to bfloat16 (8 significant bits) loses little beside inputs of fp8, with 4.
        sum_dtype = out_dtype
    sums = lax.dot_general(
        x, numbers, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=sum_dtype
    ).astype(jnp.float32)
    return scale_sums(sums, x, factors, weight)[:rows]


def scale_sums(
    sums: Float32[Array, "tokens out_dim"],
    x: Shaped[Array, "tokens in_dim"],
    factors: Float32[Array, "tokens 1"] | None,
    weight: QuantizedWeight,
) -> Float32[Array, "tokens out_dim"]:
    """Return the product with a weight of one group, given `sums` of the inputs times the stored numbers."""
    if weight.zero is not None:
        totals = x.astype(jnp.int32 if x.dtype == jnp.int8 else jnp.float32).sum(axis=1, keepdims=True)
        sums -= totals.astype(jnp.float32) * weight.zero.reshape(-1).astype(jnp.float32)
    out = sums * weight.scale.reshape(-1).astype(jnp.float32)
    return out if factors is None else out * factors
