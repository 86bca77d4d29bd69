"""The ways in which kernels multiply, whatever this machine's CPU has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.maths import pairs_from_bf16
from pallas_kernels.cpu.tile_registers import ROW_BYTES, ROWS, TILE_BYTES, TileRegisters
from pallas_kernels.cpu.types import I32
from pallas_kernels.quantized_matmul.cpu.amx_numbers import TileProducts
from pallas_kernels.quantized_matmul.cpu.integers import I16Products
from pallas_kernels.quantized_matmul.cpu.layout import INTEGERS, STRIP, Format
from pallas_kernels.quantized_matmul.cpu.numbers import LANES, SUMS, BF16Products, F32Products, PairProducts


class EmulatedBF16Products(BF16Products):
    """Pairs of bfloat16 on a CPU with AVX-512 BW; two instructions do what that of AVX512_BF16 does."""

    def multiply_add(self, f: Function, total: Value, numbers: tuple[Value, ...], factor: tuple[Value, ...]) -> Value:
        (even, odd), (left, right) = (
            pairs_from_bf16(f, f.convert("bitcast", words[0], LANES)) for words in (numbers, factor)
        )
        return f.fma(even, left, f.fma(odd, right, total))


class Plain:
    """A kernel as on a CPU without optional features."""

    @property
    def name(self) -> str:
        return f"{super().name}_plain"  # type: ignore[misc]

    def products(self, features: frozenset[str]) -> PairProducts:
        return F32Products()


class Emulated:
    """A kernel as on a CPU with AVX512_BF16; the best of this one if that has no AVX-512 BW."""

    @property
    def name(self) -> str:
        return f"{super().name}_emulated"  # type: ignore[misc]

    def products(self, features: frozenset[str]) -> PairProducts:
        return EmulatedBF16Products() if "avx512bw" in features else F32Products()


class Integers:
    """A kernel as on a CPU with AVX2 and without AVX-512; plain if this one has no AVX2."""

    format: Format

    @property
    def name(self) -> str:
        return f"{super().name}_integers"  # type: ignore[misc]

    def products(self, features: frozenset[str]) -> PairProducts:
        return I16Products(self.format) if "avx2" in features and self.format in INTEGERS else F32Products()


class EmulatedRegisters(TileRegisters):
    """Tile registers in memory, as Intel's manual describes them."""

    def __init__(self, function: Function, rows: Value) -> None:
        super().__init__(function, rows)
        self._tiles = [function.stack(TILE_BYTES) for _ in range(8)]

    def configure(self) -> None:
        pass

    def release(self) -> None:
        pass

    def clear(self, number: int) -> None:
        f = self._function
        f.loop(ROWS, lambda row: f.store(f.constant(LANES, 0), self._tiles[number], row * ROW_BYTES))

    def load(self, number: int, pointer: Value, row_bytes: Value | int = ROW_BYTES) -> None:
        self._copy(number, lambda row: (pointer, row * row_bytes), lambda row: (self._tiles[number], row * ROW_BYTES))

    def store(self, number: int, pointer: Value, row_bytes: Value | int = ROW_BYTES) -> None:
        self._copy(number, lambda row: (self._tiles[number], row * ROW_BYTES), lambda row: (pointer, row * row_bytes))

    def add_products(self, sums: int, right: int, left: int = TileRegisters.LEFT) -> None:
        f = self._function

        def multiply_row(row: Value) -> None:
            def multiply_pair(pair: Value, even: Value, odd: Value) -> list[Value]:
                own = f.broadcast(f.load(I32, self._tiles[left], row * ROW_BYTES + pair * I32.nbytes), STRIP)
                (a, b), (c, d) = (
                    pairs_from_bf16(f, one) for one in (own, f.load(LANES, self._tiles[right], pair * ROW_BYTES))
                )
                return [f.fma(a, c, even), f.fma(b, d, odd)]

            even, odd = f.loop(ROWS, multiply_pair, *[f.constant(SUMS, 0)] * 2)
            at = row * ROW_BYTES
            f.store(f.load(SUMS, self._tiles[sums], at) + (even + odd), self._tiles[sums], at)

        f.loop(self._rows_of(left), multiply_row)

    def _copy(self, number: int, source: Callable[..., Any], target: Callable[..., Any]) -> None:
        f = self._function
        f.loop(self._rows_of(number), lambda row: f.store(f.load(LANES, *source(row)), *target(row)))

    def _rows_of(self, number: int) -> Value | int:
        return ROWS if number in self.RIGHT else self._rows


class EmulatedTileProducts(TileProducts):
    registers = EmulatedRegisters

    def to_bf16(self, f: Function, total: Value) -> Value:
        return F32Products().to_bf16(f, total)


class EmulatedTiles:
    """A kernel as on a CPU with AMX; the best of this one if that has no AVX-512 BW."""

    @property
    def name(self) -> str:
        return f"{super().name}_emulated_tiles"  # type: ignore[misc]

    def products(self, features: frozenset[str]) -> PairProducts:
        return EmulatedTileProducts() if "avx512bw" in features else F32Products()
