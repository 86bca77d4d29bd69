"""The memory layout of linear layers' weights that a CPU multiplies by in packed form.

16 outputs are a strip, 32 inputs a block. The bytes of each strip and block are one contiguous run, in the order in
which the kernel reads them. A vector holds the 16 outputs of a strip side by side, each with two neighbouring inputs:

- 4 and 8 bits: the numbers `q`, then `scale` of the 16 outputs, then `minimum`, both float32; a weight is
  `scale * q + minimum`. This represents llama.cpp's Q4_0, Q4_1, Q4_K (4 bits), Q5 and Q8_0 (8 bits) without loss.
- 16 bits: the weights themselves, bfloat16.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float, Int

STRIP = 16
BLOCK = 32
Bits = Literal[4, 8, 16]

BLOCK_DTYPE = np.dtype([("q", np.uint8, BLOCK), ("scale", np.float32), ("minimum", np.float32)])
"""A block of one output as checkpoints store it: `scale * q + minimum`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """A weight of `shape` `[*out, in]`; `data` holds its bytes, uint8 `[strips, blocks, run]`."""

    data: Any
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    bits: Bits = dataclasses.field(metadata={"static": True})

    def reshape(self, *shape: int) -> PackedWeight:
        """Return the same bytes with other output dimensions; the last dimension stays the inputs."""
        return dataclasses.replace(self, shape=np.empty(self.shape, np.dtype("V0")).reshape(shape).shape)


def packed_shape(out_dim: int, in_dim: int, bits: Bits) -> tuple[int, int, int]:
    """Return the shape of the bytes. `out_dim` must be a multiple of `STRIP`, `in_dim` one of `BLOCK`."""
    assert out_dim % STRIP == 0, out_dim
    assert in_dim % BLOCK == 0, in_dim
    factors = 0 if bits == 16 else 2 * STRIP * 4
    return out_dim // STRIP, in_dim // BLOCK, STRIP * BLOCK * bits // 8 + factors


def pack_blocks(blocks: np.ndarray[Any, Any], bits: Literal[4, 8], out: np.ndarray[Any, Any]) -> None:
    """Write blocks, `BLOCK_DTYPE` `[out, in / 32]`, into `out`, uint8 of `packed_shape`."""
    strips, count, _ = out.shape
    size = STRIP * BLOCK * bits // 8
    q = np.ascontiguousarray(blocks["q"])
    if bits == 8:  # byte b of vector z is input 4z + b
        words = q.view("<u4")
    else:  # of vector z, nibble t of an output's word of parity p is input 8z + 2t + p
        eight = q.view("<u8")
        pairs = eight | eight >> 12  # byte b is now inputs b and, above it, b + 2
        words = (pairs & 0xFF | pairs >> 24 & 0xFF00 | pairs << 8 & 0xFF0000 | pairs >> 16 & 0xFF000000).astype("<u4")
    lanes = out[..., :size].view("<u4").reshape(strips, count, -1, STRIP, copy=False)
    lanes[...] = words.reshape(strips, STRIP, count, -1).transpose(0, 2, 3, 1)
    for name, at in (("scale", size), ("minimum", size + 4 * STRIP)):
        factors = out[..., at : at + 4 * STRIP].view("<f4")
        factors[...] = blocks[name].reshape(strips, STRIP, count).transpose(0, 2, 1)


def pack_dense(weight: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
    """Write bfloat16 weights `[out, in]` into `out`, uint8 of `packed_shape` for 16 bits."""
    strips = len(out)
    # Copying a pair of inputs as one word is ten times as fast as copying single inputs
    pairs = weight.view(np.uint32).reshape(strips, STRIP, -1).transpose(0, 2, 1)
    out.view(np.uint32).reshape(strips, -1, STRIP, copy=False)[...] = pairs


def gather_rows(weight: PackedWeight, indices: Int[Array, " rows"]) -> BFloat16[Array, "rows in_dim"]:
    """Return the weights of some outputs of a 16-bit weight; zeros for an index out of range."""
    assert weight.bits == 16, weight.bits
    strips, count, _ = weight.data.shape
    lanes = weight.data.reshape(strips, count, BLOCK // 2, STRIP, 4)
    # Gather bytes, then convert: otherwise XLA converts the whole weight to bfloat16 first
    pairs = lanes.at[indices // STRIP, :, :, indices % STRIP].get(mode="fill", fill_value=0)
    return jax.lax.bitcast_convert_type(pairs.reshape(len(indices), -1, 2), jnp.bfloat16)


def unpack(weight: PackedWeight) -> Float[Array, "*shape"]:
    """Return the weights in float32, in `weight.shape`."""
    data = weight.data
    strips, count, _ = data.shape
    size = STRIP * BLOCK * weight.bits // 8
    numbers = data[..., :size]
    if weight.bits == 16:
        pairs = jax.lax.bitcast_convert_type(numbers.reshape(strips, count, BLOCK // 2, STRIP, 2, 2), jnp.bfloat16)
        values = pairs.astype(jnp.float32).transpose(0, 3, 1, 2, 4)
    else:
        if weight.bits == 8:
            q = numbers.reshape(strips, count, 8, STRIP, 4).transpose(0, 3, 1, 2, 4)
        else:
            halves = numbers.reshape(strips, count, 4, STRIP, 2, 2)
            nibbles = jnp.stack([halves & 15, halves >> 4], axis=-1)  # strip, block, z, output, parity, byte, half
            q = nibbles.transpose(0, 3, 1, 2, 5, 6, 4)
        factors = jax.lax.bitcast_convert_type(data[..., size:].reshape(strips, count, 2, STRIP, 4), jnp.float32)
        scale, minimum = (factors[:, :, i].transpose(0, 2, 1)[..., None] for i in (0, 1))
        values = q.reshape(strips, STRIP, count, BLOCK).astype(jnp.float32) * scale + minimum
    return values.reshape(weight.shape)
