"""Converts stored numbers exactly to bfloat16, in the registers from which the tensor cores take them.

A warpgroup reads a tile `[64, inputs]` as words of 32 bits. Each thread keeps the numbers that it has read: threads
exchange none. The register of a number decides which input it is multiplied by, so numbers are stored in the order of
`arrangement`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector
from jaxtyping import Array, BFloat16, Int, UInt32

from pallas_kernels.quantized_matmul.scheme import BITS, NumberType

TILE_ROWS = 64
"""Rows of the operand of one tensor core instruction."""

_LANES = 4
"""Threads that share a row of an operand."""
_MOST_WORDS = 4
"""Words of a row that a thread reads with one instruction."""


@dataclasses.dataclass(frozen=True)
class Unpacking:
    """How numbers are read, if each product has inputs of one group of `group`."""

    numbers: NumberType
    group: int

    @property
    def bits(self) -> int:
        """The bits of one number."""
        return BITS[self.numbers]

    @property
    def pairs(self) -> int:
        """Pairs of numbers in a word."""
        return 16 // self.bits

    @property
    def words(self) -> int:
        """Words of a row that a thread reads at a time."""
        return min(_MOST_WORDS, self.group // (2 * self.pairs * _LANES))

    @property
    def inputs(self) -> int:
        """Inputs that a warpgroup reads at a time, whose numbers are arranged among themselves."""
        return _LANES * self.words * 2 * self.pairs

    @property
    def layout(self) -> Any:
        """The layout over threads of a tile of words, `[64, 4 * words]`."""
        row = _LANES * self.words
        tiling = plgpu.Tiling(((TILE_ROWS, row), (16, row), (8, row), (self.words,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1)

    def column(self, word: int, pair: int) -> int:
        """Return the eight columns of an operand that have a pair of each thread's word."""
        return word * self.pairs + pair

    @property
    def arrangement(self) -> tuple[int, ...]:
        """The input that each number of a run of `inputs` belongs to, in stored order."""
        # A lane's words; in a word, the numbers i and i + pairs make a pair.
        places = np.arange(self.inputs).reshape(self.words, self.pairs, _LANES, 2)
        return tuple(places.transpose(2, 0, 3, 1).ravel().tolist())

    @property
    def constant(self) -> np.ndarray:
        """A constant of `unpack`, for a kernel to read.

        A compiler that knew it would load it anew for each pair: an instruction takes one constant, and has the mask.
        """
        constants = {"int4": 0x43084308, "int8": 0x43004300, "fp4": 0x80008000, "fp8": 0x80008000}
        return np.array([constants[self.numbers]], np.uint32)

    def unpack(
        self,
        words: UInt32[Array, "rows words"],
        constant: UInt32[Array, ""],
        zero: Int[Array, " rows"] | None,
        *,
        interpret: bool,
    ) -> BFloat16[Array, "rows inputs"]:
        """Return the numbers of a tile, less the zeros of its rows, in the layout of an operand."""
        operand = functools.partial(self._operand, interpret=interpret)
        shifted = [words >> np.uint32(self.bits * i) for i in range(self.pairs)]
        if self.numbers == "int4":
            # The mantissa holds the number with its sign bit flipped, so the value is 128 + 8 + the number.
            number = operand([(s & _mask(0x000F)) ^ constant for s in shifted])
            return number - (np.array(136, jnp.bfloat16) if zero is None else self._wide(zero, 136))
        if self.numbers == "int8":
            # The low bits make 128 + their number. Less 128 it is the number; less 256 if the sign bit is set, which is
            # one of the exponent.
            low = operand([(s & _mask(0x007F)) | constant for s in shifted])
            number = low - operand([(s & _mask(0x0080)) | constant for s in shifted])
            return number if zero is None else number - self._wide(zero, 0)
        # Sign, exponent and mantissa move to their places; the exponents' biases differ by 127 - 7, or 127 - 1.
        if self.numbers == "fp4":
            numbers = [((s << 6) & _mask(0x01C0)) | ((s << 12) & constant) for s in shifted]
            return _scaled(operand(numbers), 126, interpret=interpret)
        numbers = [((s << 4) & _mask(0x07F0)) | ((s << 8) & constant) for s in shifted]
        return _scaled(operand(numbers), 120, interpret=interpret)

    def _wide(self, zero: Int[Array, " rows"], excess: int) -> BFloat16[Array, "rows inputs"]:
        """Return `zero + excess`, which bfloat16 holds exactly, of each number of a tile."""
        value = zero.astype(jnp.float32) + np.float32(excess)
        return lax.broadcast_in_dim(value.astype(jnp.bfloat16), (TILE_ROWS, self.inputs), [0])

    def _operand(self, pairs: Sequence[UInt32[Array, "rows words"]], *, interpret: bool) -> Array:
        """Return words, each a pair of bfloat16, as an operand: the registers keep their contents."""
        if interpret:
            rows = len(pairs[0])
            columns = jnp.stack(pairs, axis=-1).reshape(rows, _LANES, -1).swapaxes(1, 2)
            return lax.bitcast_convert_type(columns, jnp.bfloat16).reshape(rows, self.inputs)
        out = plgpu.ShapeDtypeStruct((TILE_ROWS, self.inputs), jnp.dtype(jnp.bfloat16), layout=plgpu.Layout.WGMMA)
        rename = plgpu.inline_mgpu(arg_types=(self.layout,) * len(pairs), return_type=out)(self._renamed)
        result: jax.Array = rename(*pairs)
        return result

    def _renamed(self, _: Any, *pairs: Any) -> Any:
        word_type, pair_type = (
            ir.VectorType.get((1,), pairs[0].mlir_dtype),
            ir.VectorType.get((2,), ir.BF16Type.get()),
        )
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((TILE_ROWS, self.inputs)), dtype=object)
        # The registers of the columns, for the two halves of a warp's rows.
        halves = registers.reshape(-1, 2)
        for half, word, i in np.ndindex(2, self.words, self.pairs):
            register = pairs[i].registers.reshape(2)[half]
            one = vector.extract_strided_slice(word_type, register, [word], [1], [1])
            halves[self.column(word, i), half] = vector.bitcast(pair_type, one)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _scaled(number: BFloat16[Array, "rows inputs"], power: int, *, interpret: bool) -> BFloat16[Array, "rows inputs"]:
    """Return numbers, of which some are subnormal, times a power of two."""
    if not interpret:
        return number * np.array(2.0**power, jnp.bfloat16)
    # A CPU takes subnormal numbers for zero: here they count from the smallest normal one.
    bits = lax.bitcast_convert_type(number, jnp.uint16)
    exponent, mantissa = (bits >> 7) & 255, (bits & 127).astype(jnp.float32)
    normal = exponent > 0
    places = jnp.where(normal, exponent, 1).astype(jnp.float32)
    magnitude = (jnp.where(normal, 128.0, 0.0) + mantissa) * jnp.exp2(places - (127 + 7 - power))
    return jnp.where(bits >> 15 == 1, -magnitude, magnitude).astype(jnp.bfloat16)


def _mask(half: int) -> np.uint32:
    """Return a mask for both halves of a word."""
    return np.uint32(half << 16 | half)
