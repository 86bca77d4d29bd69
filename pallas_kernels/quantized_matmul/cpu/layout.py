"""The memory layout of linear layers' weights that a CPU multiplies by in packed form.

16 outputs are a strip, 32 inputs a block. The bytes of each strip and block are one contiguous run, in the order in
which the kernel reads them. A vector holds the 16 outputs of a strip side by side, each with two neighbouring inputs:

- int4 and int8: the numbers `q`, unsigned, then `scale` of the 16 outputs, then `minimum`, both float32; a weight is
  `scale * q + minimum`.
- fp4 and fp8: the numbers, float4_e2m1fn or float8_e4m3fn, then `scale`.
- bf16: the weights themselves.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float, Int

from pallas_kernels.quantized_matmul.layout import FP4_VALUES
from pallas_kernels.quantized_matmul.scheme import Scheme

STRIP = 16
BLOCK = 32
Format = Literal["int4", "int8", "fp4", "fp8", "bf16"]
BITS: dict[Format, int] = {"int4": 4, "int8": 8, "fp4": 4, "fp8": 8, "bf16": 16}
INTEGERS: tuple[Format, ...] = ("int4", "int8")
"""The formats with minima."""

FACTORS = np.dtype([("scale", np.float32), ("minimum", np.float32)])
"""The factors of a block of one output: a weight is `scale * q + minimum`, where integers `q` are unsigned."""
FP8_UNIT = 256.0
"""The kernel reads fp8 numbers divided by this; their stored scales are multiplied by it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """A weight `[*outer, split, *inner, in]`; inside a `shard_map`, that of one shard.

    `data` holds its bytes, uint8 `[*outer, strips, blocks, run]`. Shards may divide the dimension `split`; its outputs
    and those of the `inner` dimensions are joined and cut into strips. Without a `scheme` it is bfloat16. `order` and
    `input_scale` are as in `QuantizedWeight`.
    """

    data: Any
    order: Any = None
    input_scale: Any = None
    scheme: Scheme | None = dataclasses.field(default=None, metadata={"static": True})
    inner: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def format(self) -> Format:
        """The format of its runs."""
        return "bf16" if self.scheme is None else self.scheme.numbers

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        *outer, strips, blocks, _ = self.data.shape
        return *outer, strips * STRIP // math.prod(self.inner), *self.inner, blocks * BLOCK

    @property
    def form(self) -> str:
        """All that the program of a product depends on besides shapes and types."""
        return f"{self.scheme or 'bf16'}{', in an order of its own' * (self.order is not None)}"

    def reshape(self, *shape: int) -> PackedWeight:
        """Return the weight with one dimension of outputs, `shape[0]`, and one of inputs."""
        assert len(shape) == 2, shape
        flat = dataclasses.replace(self, data=self.data.reshape(-1, *self.data.shape[-2:]), inner=())
        assert shape in (flat.shape, (flat.shape[0], -1)), (shape, self.shape)
        return flat


def number_bytes(format: Format) -> int:
    """Return the bytes of the numbers of one block of one strip."""
    return STRIP * BLOCK * BITS[format] // 8


def run_bytes(format: Format) -> int:
    """Return the bytes of one block of one strip: numbers, scales and minima."""
    vectors = 2 if format in INTEGERS else 0 if format == "bf16" else 1
    return number_bytes(format) + vectors * STRIP * 4


def packed_shape(out_dim: int, in_dim: int, format: Format) -> tuple[int, int, int]:
    """Return the shape of the bytes. `out_dim` must be a multiple of `STRIP`, `in_dim` one of `BLOCK`."""
    assert out_dim % STRIP == 0, out_dim
    assert in_dim % BLOCK == 0, in_dim
    return out_dim // STRIP, in_dim // BLOCK, run_bytes(format)


def pack_numbers(
    numbers: np.ndarray[Any, Any], factors: np.ndarray[Any, Any], format: Format, out: np.ndarray[Any, Any]
) -> None:
    """Write quantized weights into `out`, uint8 of `packed_shape`.

    `numbers` are uint8 `[out, in]`, contiguous; fp4 is coded as in `QuantizedWeight`. `factors` are of the type
    `FACTORS`, `[out, in / 32]`.
    """
    strips, count, _ = out.shape
    size = number_bytes(format)
    if BITS[format] == 4:  # of vector z, nibble t of an output's word of parity p is input 8z + 2t + p
        eight = numbers.view("<u8")
        pairs = eight | eight >> 12  # byte b is now inputs b and, above it, b + 2
        words = (pairs & 0xFF | pairs >> 24 & 0xFF00 | pairs << 8 & 0xFF0000 | pairs >> 16 & 0xFF000000).astype("<u4")
    else:  # byte b of an output's word in vector z is input 4z + b; words of fp8 have 16 bits, so it is input 2z + b
        words = numbers.view("<u2" if format == "fp8" else "<u4")
    lanes = out[..., :size].view(words.dtype).reshape(strips, count, -1, STRIP, copy=False)
    lanes[...] = words.reshape(strips, STRIP, count, -1).transpose(0, 2, 3, 1)
    unit = np.float32(FP8_UNIT if format == "fp8" else 1)
    for name, at in (("scale", size), ("minimum", size + 4 * STRIP)):
        if at < out.shape[-1]:
            vectors = out[..., at : at + 4 * STRIP].view("<f4")
            vectors[...] = factors[name].reshape(strips, STRIP, count).transpose(0, 2, 1)
            if name == "scale":
                vectors *= unit


def pack_dense(weight: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
    """Write bfloat16 weights `[out, in]` into `out`, uint8 of `packed_shape` for 16 bits."""
    strips = len(out)
    # Copying a pair of inputs as one word is ten times as fast as copying single inputs
    pairs = weight.view(np.uint32).reshape(strips, STRIP, -1).transpose(0, 2, 1)
    out.view(np.uint32).reshape(strips, -1, STRIP, copy=False)[...] = pairs


def gather_rows(weight: PackedWeight, indices: Int[Array, " rows"]) -> BFloat16[Array, "rows in_dim"]:
    """Return the weights of some outputs of a 16-bit weight; zeros for an index out of range."""
    assert weight.scheme is None, weight.scheme
    strips, count, _ = weight.data.shape
    lanes = weight.data.reshape(strips, count, BLOCK // 2, STRIP, 4)
    # Bytes are gathered before they are converted: otherwise XLA converts the whole weight to bfloat16 first
    pairs = lanes.at[indices // STRIP, :, :, indices % STRIP].get(mode="fill", fill_value=0)
    return jax.lax.bitcast_convert_type(pairs.reshape(len(indices), -1, 2), jnp.bfloat16)


def unpack(weight: PackedWeight) -> Float[Array, "*shape"]:
    """Return the weights in float32, in `weight.shape`."""
    data = weight.data.reshape(-1, *weight.data.shape[-2:])
    strips, count, _ = data.shape
    size, format = number_bytes(weight.format), weight.format
    numbers = data[..., :size]
    if format == "bf16":
        pairs = jax.lax.bitcast_convert_type(numbers.reshape(strips, count, BLOCK // 2, STRIP, 2, 2), jnp.bfloat16)
        return pairs.astype(jnp.float32).transpose(0, 3, 1, 2, 4).reshape(weight.shape)
    if BITS[format] == 4:
        halves = numbers.reshape(strips, count, 4, STRIP, 2, 2)
        nibbles = jnp.stack([halves & 15, halves >> 4], axis=-1)  # strip, block, z, output, parity, byte, half
        q = nibbles.transpose(0, 3, 1, 2, 5, 6, 4)
        if format == "fp4":
            q = jnp.asarray(FP4_VALUES)[q.astype(jnp.int32)]
    else:
        q = numbers.reshape(strips, count, -1, STRIP, 2 if format == "fp8" else 4).transpose(0, 3, 1, 2, 4)
        if format == "fp8":
            q = jax.lax.bitcast_convert_type(q, jnp.float8_e4m3fn)
    factors = jax.lax.bitcast_convert_type(data[..., size:].reshape(strips, count, -1, STRIP, 4), jnp.float32)
    vectors = [factors[:, :, i].transpose(0, 2, 1)[..., None] for i in range(factors.shape[2])]
    values = q.reshape(strips, STRIP, count, BLOCK).astype(jnp.float32) * vectors[0]
    if format == "fp8":
        values /= FP8_UNIT
    elif format in INTEGERS:
        values += vectors[1]
    return values.reshape(weight.shape)
