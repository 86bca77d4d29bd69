"""Rounds the inputs of a product to the numbers that a scheme quantizes them to, without a conversion to 8 bits.

The kernel multiplies them in 16 bits, which hold these numbers; XLA converts to 8 bits and back one by one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32

from pallas_kernels.quantized_matmul.activations import scale_inputs
from pallas_kernels.quantized_matmul.scheme import Scheme

_EXPONENT = 0xFF << 23
_LEAST_POWER = (127 - 6) << 23
"""The bits of the smallest normal number of fp8."""


def round_inputs(
    x: Float[Array, "tokens in_dim"], scheme: Scheme, input_scale: Float32[Array, "1"] | None
) -> tuple[BFloat16[Array, "tokens in_dim"], Float32[Array, "tokens groups"]]:
    """Return the same numbers and factors as `activations.quantize_inputs`."""
    scaled, scale = scale_inputs(x, scheme, input_scale)
    rounded = jnp.round(scaled) if scheme.numbers == "int8" else round_to_fp8(scaled)
    return rounded.astype(jnp.bfloat16), scale


def round_to_fp8(values: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Return the nearest float8_e4m3fn, half to even, of numbers in its range."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    # 1.5 * 2**20 times the power of two of each number: a sum with it has four bits of the number left
    large = jnp.maximum(bits & _EXPONENT, _LEAST_POWER) + (20 << 23) + (1 << 22)
    power = jax.lax.bitcast_convert_type(large, jnp.float32)
    return (values + power) - power
