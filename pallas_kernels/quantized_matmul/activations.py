"""Quantizes the inputs of a product, as a scheme asks: XLA joins this with whatever computes them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped

from pallas_kernels.quantized_matmul.layout import FP8
from pallas_kernels.quantized_matmul.scheme import Scheme

_LARGEST = {"int8": 127.0, "fp8": 448.0}
_SMALLEST_SCALE = 1e-10
"""Of rows that hold zeros only."""


def quantize_inputs(
    x: Float[Array, "tokens in_dim"], scheme: Scheme, input_scale: Float32[Array, "1"] | None
) -> tuple[Shaped[Array, "tokens in_dim"], Float32[Array, "tokens groups"]]:
    """Return `x` in the type of the scheme's numbers, and the factors of its groups: one if they aren't split.

    int8 rounds to the nearest number, half to even; what a static scale can't hold becomes the largest number.
    """
    scaled, scale = scale_inputs(x, scheme, input_scale)
    return jnp.round(scaled).astype(jnp.int8) if scheme.numbers == "int8" else scaled.astype(FP8), scale


def scale_inputs(
    x: Float[Array, "tokens in_dim"], scheme: Scheme, input_scale: Float32[Array, "1"] | None
) -> tuple[Float32[Array, "tokens in_dim"], Float32[Array, "tokens groups"]]:
    """Return `x` divided by the factors of its groups, in the range of the scheme's numbers, and these factors."""
    assert scheme.activations is not None, scheme
    largest = _LARGEST[scheme.numbers]
    values = x.astype(jnp.float32)
    if scheme.activations == "static":
        assert input_scale is not None, scheme
        scale = jnp.broadcast_to(input_scale, (len(x), 1))
        grouped = values[:, None]
    else:
        size = scheme.group if scheme.activations == "group" else None
        grouped = values.reshape(len(x), -1, size or x.shape[1])
        scale = jnp.maximum(jnp.abs(grouped).max(axis=-1) / largest, _SMALLEST_SCALE)
    scaled = jnp.clip(grouped / scale[..., None], -largest, largest)
    return scaled.reshape(x.shape), scale
