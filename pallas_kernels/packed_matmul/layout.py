"""How the weights of a linear layer lie in memory where a CPU multiplies by them as they are stored.

16 outputs are a strip, 32 inputs a block. For each strip and block the bytes are one run, in the order in which the
kernel reads them; a register holds the 16 outputs of a strip side by side, each with two neighbouring inputs:

- 4 and 8 bits: the numbers `q`, then `scale` of the 16 outputs, then `minimum`, float32 both; a weight is
  `scale * q + minimum`. This holds, without loss, what llama.cpp calls Q4_0, Q4_1, Q4_K (4 bits), Q5 and Q8_0 (8).
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
"""A block of one output as a checkpoint has it: `scale * q + minimum`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """A weight of `shape` `[*out, in]`, of which `data` holds the bytes, uint8 `[strips, blocks, run]`."""

    data: Any
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    bits: Bits = dataclasses.field(metadata={"static": True})

    def reshape(self, *shape: int) -> PackedWeight:
        """The same bytes with other dimensions, where these keep the outputs apart from the inputs."""
        return dataclasses.replace(self, shape=np.empty(self.shape, np.dtype("V0")).reshape(shape).shape)


def packed_shape(out_dim: int, in_dim: int, bits: Bits) -> tuple[int, int, int]:
    """The shape of the bytes. `out_dim` must be a multiple of `STRIP`, `in_dim` one of `BLOCK`."""
    assert out_dim % STRIP == 0, out_dim
    assert in_dim % BLOCK == 0, in_dim
    factors = 0 if bits == 16 else 2 * STRIP * 4
    return out_dim // STRIP, in_dim // BLOCK, STRIP * BLOCK * bits // 8 + factors


def pack_blocks(blocks: np.ndarray[Any, Any], bits: Literal[4, 8], out: np.ndarray[Any, Any]) -> None:
    """Writes blocks, `BLOCK_DTYPE` `[out, in / 32]`, into `out`, uint8 of `packed_shape`."""
    strips, count, _ = out.shape
    size = STRIP * BLOCK * bits // 8
    q = np.ascontiguousarray(blocks["q"])
    if bits == 8:  # byte b of register z is input 4z + b
        words = q.view("<u4")
    else:  # of register z, nibble t of an output's word of parity p is input 8z + 2t + p
        eight = q.view("<u8")
        pairs = eight | eight >> 12  # byte b is now inputs b and, above it, b + 2
        words = (pairs & 0xFF | pairs >> 24 & 0xFF00 | pairs << 8 & 0xFF0000 | pairs >> 16 & 0xFF000000).astype("<u4")
    lanes = out[..., :size].view("<u4").reshape(strips, count, -1, STRIP, copy=False)
    lanes[...] = words.reshape(strips, STRIP, count, -1).transpose(0, 2, 3, 1)
    for name, at in (("scale", size), ("minimum", size + 4 * STRIP)):
        factors = out[..., at : at + 4 * STRIP].view("<f4")
        factors[...] = blocks[name].reshape(strips, STRIP, count).transpose(0, 2, 1)


def pack_dense(weight: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
    """Writes bfloat16 weights `[out, in]` into `out`, uint8 of `packed_shape` for 16 bits."""
    strips = len(out)
    # A pair of inputs moves as one word, which is ten times as fast as one after the other
    pairs = weight.view(np.uint32).reshape(strips, STRIP, -1).transpose(0, 2, 1)
    out.view(np.uint32).reshape(strips, -1, STRIP, copy=False)[...] = pairs


def rows_of(weight: PackedWeight, indices: Int[Array, " rows"]) -> BFloat16[Array, "rows in_dim"]:
    """Some outputs' weights, of 16 bits; zeros for an output that there isn't."""
    assert weight.bits == 16, weight.bits
    strips, count, _ = weight.data.shape
    lanes = weight.data.reshape(strips, count, BLOCK // 2, STRIP, 4)
    # As bytes until they are few: XLA would turn all of them to bfloat16 first
    pairs = lanes.at[indices // STRIP, :, :, indices % STRIP].get(mode="fill", fill_value=0)
    return jax.lax.bitcast_convert_type(pairs.reshape(len(indices), -1, 2), jnp.bfloat16)


def unpack(weight: PackedWeight) -> Float[Array, "*shape"]:
    """The weights in float32, in the shape they stand for."""
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
