"""How a CPU with AVX2 multiplies by integers: as 16-bit integers, two inputs of 8 outputs by one instruction.

An instruction of float32 multiplies one input of 8 outputs. So without AVX-512, 16 rows take two thirds of the time of
float32.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from pallas_kernels.cpu import maths
from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.types import F32, I16, I32, PTR
from pallas_kernels.quantized_matmul.cpu.layout import BITS, BLOCK, STRIP, Format, number_bytes
from pallas_kernels.quantized_matmul.cpu.numbers import LANES, PARTS, SUMS

_SHORTS = I16.times(STRIP)
_NAN = 0x7FC00000


class I16Products:
    """Pairs of 16-bit integers, for formats of integers; sums of a block are exact.

    The inputs of a block have a power of two as their factor, by which the largest one gets 15 bits. Inputs of at least
    1/128 of the largest are exact. Others are rounded by at most 2^-15 of the largest; bfloat16 rounds each input by up
    to 2^-9 of itself. The factor follows the block; it is NaN if an input isn't finite.
    """

    tiles: dict[int, int] = dict.fromkeys((1, 2, 3, 4), 1)
    input_bytes, block_bytes = 2, 2 * BLOCK + F32.nbytes
    panel_formats: tuple[Format, ...] = ()
    sums = LANES

    def __init__(self, format: Format) -> None:
        self._bits = BITS[format]

    def prepare_inputs(self, f: Function, x: Value, count: Value, sums: Value) -> Value:
        blocks = count // BLOCK
        prepared = f.call("malloc", PTR, blocks * self.block_bytes)

        def convert(block: Value) -> None:
            halves = [f.load(_SHORTS, x, block * (2 * BLOCK) + at) for at in (0, _SHORTS.nbytes)]
            largest = maths.reduce_lanes(f, f.maximum(*(half & 0x7FFF for half in halves)), f.maximum)
            exponent = f.maximum(f.convert("zext", largest, LANES) >> 7, 15)
            power = f.select(exponent.equals(255), f.constant(LANES, _NAN), (exponent - 14) << 23)
            factor, inverse = (f.convert("bitcast", bits, SUMS) for bits in (power, (268 - exponent) << 23))
            to = f.at(prepared, block * self.block_bytes)
            total = f.constant(SUMS, 0)
            for i, half in enumerate(halves):
                shifted = f.fma(maths.from_bf16(f, half), inverse, f.constant(SUMS, maths.ROUNDER))
                numbers = f.convert("trunc", f.convert("bitcast", shifted, LANES), _SHORTS)
                f.store(f.shuffle(numbers, numbers, self._order()), to, i * _SHORTS.nbytes)
                total = total + (shifted - maths.ROUNDER)
            f.store(f.first(factor), to, 2 * BLOCK)
            f.store(f.first(maths.reduce_lanes(f, total, operator.add) * factor), sums, block * F32.nbytes)

        f.loop(blocks, convert)
        return prepared

    def free_inputs(self, f: Function, prepared: Value) -> None:
        f.call("free", None, prepared)

    def spread_inputs(self, f: Function, inputs: Value, pair: int) -> tuple[Value, ...]:
        return (f.broadcast(f.load(I32, inputs, pair * I32.nbytes), STRIP),)

    def weight_pairs(self, f: Function, part: Value, format: Format) -> Iterator[tuple[Value, ...]]:
        low = 2**self._bits - 1
        for at in range(0, number_bytes(format) // PARTS, LANES.nbytes):
            lanes = f.load(LANES, part, at)
            for shift in range(0, 16, self._bits):
                yield ((lanes >> shift) & (low << 16 | low),)

    def multiply_add(self, f: Function, total: Value, numbers: tuple[Value, ...], factor: tuple[Value, ...]) -> Value:
        # In another order LLVM would add products to each other first, which registers don't have room for
        return f.fence(total + f.dot_i16(numbers[0], factor[0]))

    def sum_of_block(self, f: Function, total: Value, inputs: Value) -> Value:
        factor = f.broadcast(f.load(F32, inputs, 2 * BLOCK), STRIP)
        return f.convert("sitofp", total, SUMS) * factor

    def to_bf16(self, f: Function, total: Value) -> Value:
        return maths.to_bf16(f, total)

    def _order(self) -> list[int]:
        """Return the order of 16 inputs: with eight bits, the numbers of a pair are two bytes apart."""
        fours = (0, 1, 2, 3) if self._bits == 4 else (0, 2, 1, 3)
        return [four + i for four in range(0, STRIP, 4) for i in fours]
