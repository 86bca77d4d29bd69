"""The ways in which kernels multiply, whatever this machine's CPU has."""

from __future__ import annotations

from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.maths import pairs_from_bf16
from pallas_kernels.quantized_matmul.cpu.integers import I16Products
from pallas_kernels.quantized_matmul.cpu.layout import INTEGERS, Format
from pallas_kernels.quantized_matmul.cpu.numbers import LANES, BF16Products, F32Products, PairProducts


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
