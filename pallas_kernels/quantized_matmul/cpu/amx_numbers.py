"""How a CPU with tile registers (AMX) multiplies pairs of bfloat16: a tile of rows at a time, or one row in that order.

For one row, numbers take longer to become a tile than to be multiplied, so ordinary instructions multiply them. They
sum the products of first and of second neighbours apart, as a tile register does, and get the same sums.
"""

from __future__ import annotations

from collections.abc import Iterator

from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.maths import pairs_from_bf16
from pallas_kernels.cpu.tile_registers import TileRegisters
from pallas_kernels.cpu.types import F16, F32, I8, I16
from pallas_kernels.quantized_matmul.cpu.layout import STRIP, Format, number_bytes
from pallas_kernels.quantized_matmul.cpu.numbers import LANES, PARTS, BF16Products

_BYTES, _WORDS = I8.times(4 * STRIP), I16.times(2 * STRIP)
_BIAS = (127 - 15) << 7
"""The difference between the exponents' biases of a half and of a bfloat16, at the place of bfloat16's exponent."""


class TileProducts(BF16Products):
    """Pairs of bfloat16, multiplied and added to float32 sums a tile at a time, by `AmxTiles`."""

    registers: type[TileRegisters] = TileRegisters

    def weight_pairs(self, f: Function, part: Value, format: Format) -> Iterator[tuple[Value, ...]]:
        if format != "int8":
            yield from super().weight_pairs(f, part, format)
            return
        nothing = f.constant(_BYTES, 0)
        for at in range(0, number_bytes(format) // PARTS, _BYTES.nbytes):
            loaded = f.load(_BYTES, part, at)
            for first in (0, 2):  # a byte follows a zero byte
                places = [
                    place for at in range(first, _BYTES.lanes, 4) for place in (at, _BYTES.lanes, at + 1, _BYTES.lanes)
                ]
                numbers = f.convert("bitcast", f.shuffle(loaded, nothing, places), _WORDS)
                # Halves are made by one instruction, and hold these numbers in as many bits as a bfloat16 has
                half = f.convert("bitcast", f.convert("uitofp", numbers, F16.times(_WORDS.lanes)), _WORDS)
                yield (f.select(half.equals(0), half, (half >> 3) + _BIAS),)


class RowProducts(BF16Products):
    """Pairs of bfloat16 of one row, summed in the order of tile registers: second neighbours have sums of their own."""

    tiles: dict[int, int] = dict.fromkeys((1,), 4)
    sums = F32.times(2 * STRIP)
    panel_formats: tuple[Format, ...] = ()

    def multiply_add(self, f: Function, total: Value, numbers: tuple[Value, ...], factor: tuple[Value, ...]) -> Value:
        left, right = (
            f.shuffle(*pairs_from_bf16(f, f.convert("bitcast", one[0], LANES)), range(2 * STRIP))
            for one in (numbers, factor)
        )
        return f.fma(left, right, total)

    def sum_of_block(self, f: Function, total: Value, inputs: Value) -> Value:
        first, second = (f.shuffle(total, total, range(at, at + STRIP)) for at in (0, STRIP))
        return first + second
