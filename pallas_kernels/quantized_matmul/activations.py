"""Quantizes the inputs of a product, as a scheme asks."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped

from pallas_kernels.dispatch import Backend, has_triton
from pallas_kernels.quantized_matmul.layout import FP8
from pallas_kernels.quantized_matmul.scheme import Scheme
from pallas_kernels.target import KernelTarget

LARGEST = {"int8": 127.0, "fp8": 448.0}
SMALLEST_SCALE = 1e-10
"""The scale of rows that hold only zeros."""

# cuBLASLt multiplies fp8 only if the number of rows is a multiple of this.
_CUBLAS_ROWS = 16
# The longest row that a program of the kernel can keep in registers.
_MOST_INPUTS = 2**15


def quantize_inputs(
    x: Float[Array, "tokens in_dim"],
    scheme: Scheme,
    input_scale: Float32[Array, "1"] | None,
    backend: Backend,
    *,
    one_pass: bool,
) -> tuple[Shaped[Array, "rows in_dim"], Float32[Array, "rows groups"]]:
    """Return `x` in the type of the scheme's numbers, and the factors of its groups: one a row if it isn't split.

    int8 rounds to the nearest number, half to even. Inputs beyond the range of a static scale become the largest
    number. With `one_pass`, a kernel reads each row once, if the device has one: XLA would read `x` twice, unless it
    can join this with a norm that precedes. The kernel also runs if cuBLASLt needs more rows than `x` has, and adds
    these rows.
    """
    size, dtype = _group(x, scheme), jnp.int8 if scheme.numbers == "int8" else FP8
    padding = -len(x) % _CUBLAS_ROWS if backend.name == "xla" and scheme.numbers == "fp8" else 0
    if (one_pass or padding) and _has_kernel(x.shape[1], size, scheme, backend.target):
        # The import stands here as only GPUs need this compiler's front end.
        from pallas_kernels.quantized_matmul.triton.inputs import quantize_rows

        largest = LARGEST[scheme.numbers]
        return quantize_rows(x, len(x) + padding, size, dtype, largest, SMALLEST_SCALE, interpret=False)
    scaled, scale = scale_inputs(x, scheme, input_scale)
    return (jnp.round(scaled) if scheme.numbers == "int8" else scaled).astype(dtype), scale


def scale_inputs(
    x: Float[Array, "tokens in_dim"], scheme: Scheme, input_scale: Float32[Array, "1"] | None
) -> tuple[Float32[Array, "tokens in_dim"], Float32[Array, "tokens groups"]]:
    """Return `x` divided by the factors of its groups, in the range of the scheme's numbers, and these factors."""
    assert scheme.activations is not None, scheme
    largest = LARGEST[scheme.numbers]
    values = x.astype(jnp.float32)
    if scheme.activations == "static":
        assert input_scale is not None, scheme
        scale = jnp.broadcast_to(input_scale, (len(x), 1))
        grouped = values[:, None]
    else:
        grouped = values.reshape(len(x), -1, _group(x, scheme))
        scale = jnp.maximum(jnp.abs(grouped).max(axis=-1) / largest, SMALLEST_SCALE)
    scaled = jnp.clip(grouped / scale[..., None], -largest, largest)
    return scaled.reshape(x.shape), scale


def _group(x: Array, scheme: Scheme) -> int:
    """Return how many neighbouring inputs share a factor."""
    return (scheme.group if scheme.activations == "group" else None) or x.shape[1]


def _has_kernel(inputs: int, size: int, scheme: Scheme, target: KernelTarget) -> bool:
    """Return whether a kernel quantizes such rows on this target; static scales need no pass to find them."""
    if not has_triton(target) or scheme.activations == "static":
        return False
    if scheme.numbers == "fp8" and not target.multiplies_fp8:
        return False
    return inputs <= _MOST_INPUTS and (size == inputs or size & (size - 1) == 0)
