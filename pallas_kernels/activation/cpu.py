"""The kernels of `gated_silu` and `gelu` for a CPU."""

from __future__ import annotations

import dataclasses

from pallas_kernels.cpu import maths
from pallas_kernels.cpu.emit import Function, Module, Value
from pallas_kernels.cpu.ffi import Call, handler
from pallas_kernels.cpu.types import F32, I16, I64

LANES = 16
_BITS, _NUMBERS = I16.times(LANES), F32.times(LANES)
# Its exponential is near the largest float32, and its inverse is almost 0.
_LARGEST = 88.0
# An item with this many numbers is worth starting a thread
_ITEM_NUMBERS = 1 << 14


# erf(z) = 1 - t * p(t) * exp(-z^2) for z >= 0, with t = 1 / (1 + z * _ERF_SCALE): Abramowitz and Stegun, 7.1.26
_ERF_SCALE = 0.3275911
_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


@dataclasses.dataclass(frozen=True)
class Gelu:
    """The kernel: bfloat16 if `is_bf16`, else float32, `[tokens, ffn]`, where `ffn` is a multiple of `LANES`."""

    is_bf16: bool

    @property
    def name(self) -> str:
        """See `cpu.Kernel`."""
        return f"llvm_gelu_{'bf16' if self.is_bf16 else 'f32'}"

    def write(self, module: Module, features: frozenset[str]) -> None:
        """See `cpu.Kernel`."""
        handler(module, self.name, 1, 1, lambda call: self._share(call, "avx512bf16" in features))

    def _share(self, call: Call, has_bf16: bool) -> None:
        f = call.function
        x, out = call.arguments[0], call.results[0]
        total = out.dim(0) * out.dim(1)
        per_item = f.constant(I64, _ITEM_NUMBERS)
        size = 2 if self.is_bf16 else 4

        def work(f: Function, item: Value, *captured: Value) -> None:
            x, out, total, per_item = captured
            first = item * per_item

            def activate(at: Value) -> None:
                if not self.is_bf16:
                    f.store(_gelu(f, f.load(_NUMBERS, x, at * size)), out, at * size)
                    return
                y = _gelu(f, maths.from_bf16(f, f.load(_BITS, x, at * size)))
                f.store(f.to_bf16(y) if has_bf16 else maths.to_bf16(f, y), out, at * size)

            f.loop(f.minimum(first + per_item, total), activate, start=first, step=LANES)

        call.parallel_for((total + per_item - 1) // per_item, [x.data, out.data, total, per_item], work)


def _gelu(f: Function, x: Value) -> Value:
    z = f.maximum(x, 0.0 - x) * 0.5**0.5
    t = f.constant(_NUMBERS, 1.0) / f.fma(z, f.constant(_NUMBERS, _ERF_SCALE), f.constant(_NUMBERS, 1.0))
    p = f.constant(_NUMBERS, _ERF[0])
    for coefficient in _ERF[1:]:
        p = f.fma(p, t, f.constant(_NUMBERS, coefficient))
    # Twice the share beyond |x|
    tail = p * t * maths.exp(f, 0.0 - z * z)
    half = x * 0.5
    return f.select(x < 0.0, half * tail, half * (2.0 - tail))


@dataclasses.dataclass(frozen=True)
class GatedSilu:
    """The kernel: bfloat16 `[tokens, 2 * ffn]` to bfloat16 `[tokens, ffn]`, where `ffn` is a multiple of `LANES`."""

    @property
    def name(self) -> str:
        """See `cpu.Kernel`."""
        return "llvm_gated_silu"

    def write(self, module: Module, features: frozenset[str]) -> None:
        """See `cpu.Kernel`."""
        handler(module, self.name, 1, 1, lambda call: self._share(call, "avx512bf16" in features))

    def _share(self, call: Call, has_bf16: bool) -> None:
        f = call.function
        both, out = call.arguments[0], call.results[0]
        rows, width = out.dim(0), out.dim(1)
        per_item = f.constant(I64, _ITEM_NUMBERS) // width + 1

        def to_bf16(x: Value) -> Value:
            return x.function.to_bf16(x) if has_bf16 else maths.to_bf16(x.function, x)

        def rounded(x: Value) -> Value:
            return maths.from_bf16(x.function, x.function.convert("bitcast", to_bf16(x), _BITS))

        def work(f: Function, item: Value, *captured: Value) -> None:
            both, out, rows, width, per_item = captured
            first = item * per_item

            def row(r: Value) -> None:
                gates, to = f.at(both, r * width * 4), f.at(out, r * width * 2)

                def activate(at: Value) -> None:
                    gate, up = (maths.from_bf16(f, f.load(_BITS, gates, start * 2)) for start in (at, at + width))
                    exponential = rounded(maths.exp(f, f.minimum(0.0 - gate, _LARGEST)))
                    sigmoid = rounded(f.constant(_NUMBERS, 1.0) / rounded(exponential + 1.0))
                    f.store(to_bf16(rounded(gate * sigmoid) * up), to, at * 2)

                f.loop(width, activate, step=LANES)

            f.loop(f.minimum(first + per_item, rows), row, start=first)

        call.parallel_for((rows + per_item - 1) // per_item, [both.data, out.data, rows, width, per_item], work)
