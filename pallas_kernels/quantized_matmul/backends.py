"""The choice of a backend for a weight, decided before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped

from pallas_kernels.dispatch import Backend, BackendTable
from pallas_kernels.quantized_matmul.layout import QuantizedWeight, num_groups, numbers_shape
from pallas_kernels.quantized_matmul.scheme import Scheme
from pallas_kernels.target import KernelTarget


class ProductModule(Protocol):
    """The functions that every backend's module has.

    A backend whose kernel needs the numbers of a weight in another order also has `arrangement`.
    """

    def refusal(self, out_dim: int, in_dim: int, scheme: Scheme, target: KernelTarget) -> str | None:
        """Return why the backend doesn't multiply by such a weight (of one shard) on this target, or None."""

    def multiply(
        self,
        x: Shaped[Array, "tokens in_dim"],
        factors: Float32[Array, "tokens groups"] | None,
        weight: QuantizedWeight,
        *,
        out_dtype: Any,
        backend: Backend,
    ) -> Float[Array, "tokens out_dim"]:
        """Return `x @ weight.T` with sums in float32, or rounded to `out_dtype`, to which the caller converts them.

        `x` is in the order of the numbers. If the scheme quantizes activations, `x` has the type of the numbers and
        must be multiplied by `factors`, of each row or of each of its groups.
        """


# XLA takes few schemes. When it compiles a product, it times cuBLASLt and kernels of its own on the device.
#
# On Hopper, mosaic_gpu's machine code suggests that it is faster than triton, but no device has timed it yet. An H100
# found its products right, except those of fp8 with fp8: tensor cores keep their sums to 1e-4 of the magnitudes. The
# machine code for an H200 lets expect:
# - At one row, 16 KiB of 4-bit weights take a scheduler 700 instructions, and 880 cycles to arrive, with 112 KiB in
#   flight and equal shares for all cores. So large products reach 80 to 90 % of the memory's speed.
# - At 64 rows, the tensor cores take 1,020 cycles for the same weights.
# - At 2,048 rows, a warpgroup issues 270 instructions besides products that take 512 cycles, while the products of
#   another warpgroup run. So products reach 600 to 700 TFLOP/s.
BACKENDS = BackendTable[ProductModule](
    "quantized_matmul",
    names=("reference", "xla", "triton", "mosaic_gpu", "mosaic_tpu"),
    preferred={
        "cuda": ("xla", "triton", "mosaic_gpu"),
        "gpu": ("xla", "triton", "mosaic_gpu"),
        "tpu": ("xla", "mosaic_tpu"),
    },
)


def arrangement(backend: Backend, in_dim: int, scheme: Scheme) -> tuple[int, ...]:
    """Return how the numbers of a weight of one shard must be arranged (see `QuantizedWeight`)."""
    arrange = getattr(BACKENDS.module(backend.name), "arrangement", None)
    return () if arrange is None else arrange(in_dim, scheme, backend.target)


def make_weight(
    shape: tuple[int, int], scheme: Scheme, backend: Backend, array: Callable[[tuple[int, ...], Any], Any]
) -> QuantizedWeight:
    """Return a weight of one shard, with factors of bfloat16; `array` makes its arrays of a shape and a type."""
    groups = shape[0], num_groups(shape[1], scheme)
    return QuantizedWeight(
        array(*numbers_shape(shape, scheme)),
        array(groups, jnp.bfloat16),
        array(groups, jnp.int16) if scheme.zeros else None,
        None,
        array((1,), jnp.float32) if scheme.activations == "static" else None,
        scheme,
        backend,
        arrangement(backend, shape[1], scheme),
    )
