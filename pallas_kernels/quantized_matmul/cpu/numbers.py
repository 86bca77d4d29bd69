"""How a CPU reads the numbers of a packed weight and multiplies inputs by them, two neighbouring inputs at a time.

If the CPU multiplies bfloat16 (AVX512_BF16), one instruction multiplies two inputs of 16 outputs, and 4-bit numbers
become bfloat16 by a table lookup in a register (AVX-512 BW). Otherwise both operands are converted to float32 first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from pallas_kernels.cpu import maths
from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.types import F16, F32, I16, I32, PTR, Type
from pallas_kernels.quantized_matmul.cpu.layout import BITS, BLOCK, FP8_UNIT, STRIP, Format, number_bytes
from pallas_kernels.quantized_matmul.layout import FP4_VALUES

PARTS = 4
"""The parts of a block that a loop goes through: in longer code, LLVM loads more at once than registers hold."""
SUMS = F32.times(STRIP)
LANES = I32.times(STRIP)
_WORDS = I16.times(2 * STRIP)
_SHORTS, _HALVES = I16.times(STRIP), F16.times(STRIP)
_HIGH = -(1 << 16)


class PairProducts(Protocol):
    """How a kernel multiplies pairs of neighbouring inputs.

    `tiles` maps the number of rows of a tile, ascending, to its strips: as many as registers hold sums for. Numbers of
    `panel_formats` take about as long to unpack as to multiply by the rows of a tile; a pair of these is one vector. A
    prepared block has `block_bytes`, and its products are added as `sums`.
    """

    tiles: dict[int, int]
    input_bytes: int
    block_bytes: int
    panel_formats: tuple[Format, ...]
    sums: Type

    def prepare_inputs(self, f: Function, x: Value, count: Value, sums: Value) -> Value:
        """Return a pointer to `count` inputs in the form that tiles read; `x` are bfloat16.

        If this rounds inputs, `sums`, of the inputs of each block, become the sums of the rounded ones.
        """

    def free_inputs(self, f: Function, prepared: Value) -> None:
        """Free what `prepare_inputs` has allocated."""

    def spread_inputs(self, f: Function, inputs: Value, pair: int) -> tuple[Value, ...]:
        """Return two neighbours of the prepared inputs of a part, broadcast to all lanes."""

    def weight_pairs(self, f: Function, part: Value, format: Format) -> Iterator[tuple[Value, ...]]:
        """Yield the numbers of one of the `PARTS` of a strip's block, pair by pair."""

    def multiply_add(self, f: Function, total: Value, numbers: tuple[Value, ...], factor: tuple[Value, ...]) -> Value:
        """Add the products of one pair to the total."""

    def sum_of_block(self, f: Function, total: Value, inputs: Value) -> Value:
        """Return the sum of a block's products in float32, of the prepared block of a row."""

    def to_bf16(self, f: Function, total: Value) -> Value:
        """Return the nearest bfloat16."""


class BF16Products:
    """Pairs of bfloat16, multiplied and added to float32 sums by one instruction."""

    tiles: dict[int, int] = dict.fromkeys((1, 2, 3, 4), 4)
    input_bytes, block_bytes = 2, 2 * BLOCK
    sums = SUMS
    panel_formats: tuple[Format, ...] = ("int8", "fp8")

    def prepare_inputs(self, f: Function, x: Value, count: Value, sums: Value) -> Value:
        return x

    def free_inputs(self, f: Function, prepared: Value) -> None:
        pass

    def spread_inputs(self, f: Function, inputs: Value, pair: int) -> tuple[Value, ...]:
        return (f.broadcast(f.load(I32, inputs, pair * I32.nbytes), STRIP),)

    def weight_pairs(self, f: Function, part: Value, format: Format) -> Iterator[tuple[Value, ...]]:
        if format == "fp8":
            for at in range(0, number_bytes(format) // PARTS, _SHORTS.nbytes):
                lanes = f.convert("zext", f.load(_SHORTS, part, at), LANES)
                yield (_bf16_of_fp8(f, f.convert("bitcast", (lanes << 16) | ((lanes & 0xFF) << 8), _WORDS)),)
            return
        if format == "int8":
            for even, odd in F32Products().weight_pairs(f, part, format):
                low, high = (f.convert("bitcast", number, LANES) for number in (even, odd))
                yield ((low >> 16) | (high & _HIGH),)
            return
        # The table has every entry twice, so that a lookup depends only on the low four bits of a number
        table = f.constant(_WORDS, [_bfloat16(value) for value in _table(format)] * 2)
        for at in range(0, number_bytes(format) // PARTS, _WORDS.nbytes):
            if format == "bf16":
                yield (f.load(LANES, part, at),)
                continue
            words = f.load(_WORDS, part, at)
            for nibble in range(4):
                yield (f.call("llvm.x86.avx512.permvar.hi.512", _WORDS, table, words >> 4 * nibble),)

    def multiply_add(self, f: Function, total: Value, numbers: tuple[Value, ...], factor: tuple[Value, ...]) -> Value:
        return f.dot_bf16(numbers[0], factor[0], total)

    def sum_of_block(self, f: Function, total: Value, inputs: Value) -> Value:
        return total

    def to_bf16(self, f: Function, total: Value) -> Value:
        return f.to_bf16(total)


class F32Products:
    """Pairs of float32, on any CPU; `has_tables` says that it looks up float32 in a register (AVX-512)."""

    input_bytes, block_bytes = 4, 4 * BLOCK
    panel_formats: tuple[Format, ...] = ()
    sums = SUMS

    def __init__(self, *, has_tables: bool = False) -> None:
        self._has_tables = has_tables
        # All rows of a tile share the conversion of a number, so more rows are better. With 256 bits, a strip takes
        # twice as many vectors, and there are half as many registers.
        self.tiles: dict[int, int] = dict.fromkeys((1, 2, 4, 6, 8), 2) if has_tables else {1: 2, 2: 2, 3: 1, 4: 1}

    def prepare_inputs(self, f: Function, x: Value, count: Value, sums: Value) -> Value:
        prepared = f.call("malloc", PTR, count * F32.nbytes)

        def convert(first: Value) -> None:
            f.store(maths.from_bf16(f, f.load(_SHORTS, x, first * 2)), prepared, first * F32.nbytes)

        f.loop(count, convert, step=STRIP)
        return prepared

    def free_inputs(self, f: Function, prepared: Value) -> None:
        f.call("free", None, prepared)

    def spread_inputs(self, f: Function, inputs: Value, pair: int) -> tuple[Value, ...]:
        places = (2 * pair * F32.nbytes, (2 * pair + 1) * F32.nbytes)
        return tuple(f.broadcast(f.load(F32, inputs, place), STRIP) for place in places)

    def weight_pairs(self, f: Function, part: Value, format: Format) -> Iterator[tuple[Value, ...]]:
        if format == "fp8":
            for at in range(0, number_bytes(format) // PARTS, _SHORTS.nbytes):
                shorts = f.load(_SHORTS, part, at)
                yield tuple(_f32_of_fp8(f, high) for high in (shorts << 8, shorts))
            return
        bits = BITS[format]
        for at in range(0, number_bytes(format) // PARTS, LANES.nbytes):
            lanes = f.load(LANES, part, at)
            if format == "bf16":
                yield tuple(f.convert("bitcast", half, SUMS) for half in (lanes << 16, lanes & _HIGH))
                continue
            for pair in range(16 // bits):
                # With four bits, the two numbers of a pair are 16 bits apart; with eight bits they are neighbours
                even, odd = (4 * pair, 4 * pair + 16) if bits == 4 else (16 * pair, 16 * pair + 8)
                yield tuple(self._numbers(f, lanes >> shift, format) for shift in (even, odd))

    def multiply_add(self, f: Function, total: Value, numbers: tuple[Value, ...], factor: tuple[Value, ...]) -> Value:
        return f.fma(numbers[0], factor[0], f.fma(numbers[1], factor[1], total))

    def sum_of_block(self, f: Function, total: Value, inputs: Value) -> Value:
        return total

    def to_bf16(self, f: Function, total: Value) -> Value:
        return maths.to_bf16(f, total)

    def _numbers(self, f: Function, bits: Value, format: Format) -> Value:
        """Return the numbers in the lowest bits of each lane."""
        if BITS[format] == 4 and self._has_tables:
            table = f.constant(SUMS, _table(format))
            return f.call("llvm.x86.avx512.permvar.sf.512", SUMS, table, bits)
        if format == "fp4":
            return _f32_of_fp4(f, bits)
        return f.convert("sitofp", bits & (2 ** BITS[format] - 1), SUMS)


def _table(format: Format) -> list[float]:
    """Return the value of each number of four bits."""
    return FP4_VALUES.tolist() if format == "fp4" else list(map(float, range(16)))


def _f32_of_fp4(f: Function, bits: Value) -> Value:
    """Return the 4-bit floats in the lowest bits of each lane."""
    size = bits & 7
    half = int(np.float32(0.5).view(np.int32))
    # Below 2 the number counts halves; from there on its bits are the highest of an exponent and a mantissa
    magnitude = f.select(size < 2, size * half, (size << 22) + half)
    return f.convert("bitcast", magnitude | (bits & 8) << 28, SUMS)


def _f32_of_fp8(f: Function, high: Value) -> Value:
    """Return float8_e4m3fn numbers, the high bytes of 16-bit integers, divided by `FP8_UNIT`, in float32.

    Halves have more bits of exponent and of mantissa. Unlike float32, halves below the normal range are always
    converted, whatever the mode of the thread.
    """
    halves = f.convert("bitcast", f.binary("ashr", high, 1) & ~0x407F, _HALVES)
    return f.convert("fpext", halves, SUMS)


def _bf16_of_fp8(f: Function, high: Value) -> Value:
    """Return the same numbers as `_f32_of_fp8`, as the bits of bfloat16.

    Products take bfloat16 below its normal range for zero, so fp8 numbers below the normal range of fp8 come from a
    table.
    """
    normal = ((high >> 4) & 0x7F0) + (_bfloat16(2**-6 / FP8_UNIT) - (1 << 7))
    table = f.constant(_WORDS, [_bfloat16(i * 2**-9 / FP8_UNIT) for i in range(_WORDS.lanes)])
    small = f.call("llvm.x86.avx512.permvar.hi.512", _WORDS, table, high >> 8)
    return f.select((high & 0x7800).equals(0), small, normal) | (high & 0x8000)


def _bfloat16(number: float) -> int:
    """Return the bfloat16 bits of a number of few bits."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0] >> 16)
