"""The kernel of `gated_silu` for a CPU."""

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
