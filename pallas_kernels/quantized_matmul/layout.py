"""A quantized weight as GPUs, TPUs and the reference multiply by it: numbers, scales and zeros in rows of outputs.

A CPU has a layout of its own (`cpu/layout.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from pallas_kernels.dispatch import Backend
from pallas_kernels.quantized_matmul.scheme import Scheme

FP8 = np.dtype(jnp.float8_e4m3fn)
_STORED = {"int4": np.dtype(np.uint8), "int8": np.dtype(np.int8), "fp4": np.dtype(np.uint8), "fp8": FP8}
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The values of 4-bit floats, by their bits: a sign, two bits of exponent, one of mantissa."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A weight `[*out, in]`; inside a `shard_map`, that of one shard.

    - `numbers`: int8 or float8_e4m3fn `[*out, in]`; numbers of four bits are uint8 `[*out, in / 2]`. There, byte j has
      input 2j in its low four bits and input 2j + 1 in its high ones, int4 in two's complement, fp4 as the index in
      `FP4_VALUES`.
    - `scale` and, if the scheme has zeros, `zero`: any float type, `[*out, groups]`; a row is one group if
      `scheme.group` is None. Zeros that are whole numbers may be int16: then kernels may subtract them from the
      numbers, and `q - zero` is at most 256 in magnitude, which bfloat16 holds exactly.
    - `order`, if the numbers are stored in another order of inputs: int32 `[in]`; number i of a row belongs to input
      `order[i]`.
    - `input_scale`, if `scheme.activations` is "static": float32 `[1]`.
    - `arrangement`: the order in which the backend's kernel needs the numbers. A row is divided into runs of this
      length. Number i of a run belongs to input `arrangement[i]` of the run. It is empty if numbers are in order.
    """

    numbers: Any
    scale: Any
    zero: Any
    order: Any
    input_scale: Any
    scheme: Scheme = dataclasses.field(metadata={"static": True})
    backend: Backend = dataclasses.field(default=Backend(), metadata={"static": True})
    arrangement: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        *out, stored = self.numbers.shape
        return *out, stored * 8 // self.scheme.bits

    @property
    def form(self) -> str:
        """All that the program of a product depends on besides shapes and types."""
        order = ", in an order of its own" if self.order is not None else ""
        return f"{self.scheme}{order}, {self.scale.dtype.name} factors, {self.backend.name}"

    def reshape(self, *shape: int) -> QuantizedWeight:
        """Return the weight with other output dimensions; the last dimension stays the inputs."""
        out = np.empty(self.shape, np.dtype("V0")).reshape(shape).shape[:-1]
        numbers, scale, zero = (
            None if x is None else x.reshape(*out, x.shape[-1]) for x in (self.numbers, self.scale, self.zero)
        )
        return dataclasses.replace(self, numbers=numbers, scale=scale, zero=zero)


def numbers_shape(shape: tuple[int, ...], scheme: Scheme) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and the type of the stored numbers of a weight of `shape`."""
    *out, inputs = shape
    return (*out, inputs * scheme.bits // 8), _STORED[scheme.numbers]


def num_groups(inputs: int, scheme: Scheme) -> int:
    """Return the number of groups of a row; `inputs` must be a multiple of the group."""
    assert inputs % (scheme.group or inputs) == 0, (inputs, scheme)
    return inputs // (scheme.group or inputs)


def unpack_numbers(weight: QuantizedWeight) -> Float32[Array, "*out in_dim"]:
    """Return the numbers `q` of a weight, in order."""
    q = weight.numbers
    if weight.scheme.numbers == "int4":
        q = (jnp.stack([q << 4, q], axis=-1).astype(jnp.int8) >> 4).reshape(weight.shape)
    elif weight.scheme.numbers == "fp4":
        q = jnp.asarray(FP4_VALUES)[jnp.stack([q & 15, q >> 4], axis=-1).astype(jnp.int32)].reshape(weight.shape)
    if weight.arrangement:
        runs = q.reshape(*q.shape[:-1], -1, len(weight.arrangement))
        q = runs[..., np.argsort(weight.arrangement)].reshape(weight.shape)
    return q.astype(jnp.float32)


def dequantize(weight: QuantizedWeight) -> Float32[Array, "*out in_dim"]:
    """Return the weights in float32, each with one rounding, in the order in which the numbers are stored."""
    q = unpack_numbers(weight)
    grouped = q.reshape(*q.shape[:-1], weight.scale.shape[-1], -1)
    if weight.zero is not None:
        grouped -= weight.zero[..., None].astype(jnp.float32)
    return (grouped * weight.scale[..., None].astype(jnp.float32)).reshape(q.shape)
