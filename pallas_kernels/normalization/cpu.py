"""Kernels for norms and log-sum-exps of rows. One thread handles a row and adds in a fixed order."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.cpu import call, maths
from pallas_kernels.cpu.emit import Function, Module, Value
from pallas_kernels.cpu.ffi import Call, handler
from pallas_kernels.cpu.types import F32, I1, I16, I64

_LANES = 16
_NUMBERS, _HALVES = F32.times(_LANES), I16.times(_LANES)
# An item with this many numbers is worth starting a thread
_ITEM_NUMBERS = 1 << 14
_VECTORS = 4
_BLOCK = _VECTORS * _LANES
# The dtypes of rows and weights that go together
_DTYPES = ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")
_SIZES = {"bfloat16": 2, "float32": 4}


def supports_norm(x: Float[Array, "*rows dim"], weight: Float[Array, "*some dim"]) -> bool:
    """Return whether the norms support these sizes and types."""
    return x.shape[-1] % _LANES == 0 and (x.dtype.name, weight.dtype.name) in _DTYPES


def rms_norm(x: Float[Array, "*rows dim"], weight: Float[Array, "*some dim"], eps: float) -> Float[Array, "*rows dim"]:
    """Compute `api.rms_norm`. The shape of `weight` equals the last dimensions of `x`."""
    return _normed(Norm(x.dtype.name, weight.dtype.name, float(eps)), x, weight)


def layer_norm(
    x: Float[Array, "*rows dim"],
    weight: Float[Array, "*some dim"],
    bias: Float[Array, "*some dim"] | None = None,
    *,
    eps: float,
) -> Float[Array, "*rows dim"]:
    """Compute `api.layer_norm`. The shapes of `weight` and `bias` equal the last dimensions of `x`."""
    kernel = Norm(x.dtype.name, weight.dtype.name, float(eps), centered=True, biased=bias is not None)
    return _normed(kernel, x, weight) if bias is None else _normed(kernel, x, weight, bias)


def _normed(kernel: Norm, x: Array, *factors: Array) -> Array:
    dim = x.shape[-1]
    for factor in factors:
        assert x.shape[x.ndim - factors[0].ndim :] == factor.shape, (x.shape, factor.shape)
        assert factor.dtype.name == kernel.weight_dtype
    rows, *others = (array.reshape(-1, dim) for array in (x, *factors))
    out = call(kernel, jax.ShapeDtypeStruct(rows.shape, x.dtype), rows, *others)
    return out.reshape(x.shape)


def log_sum_exp(x: Float[Array, "rows some"]) -> Float[Array, "rows 1"]:
    """Return the logarithm of the sum of exponentials of each row, float32."""
    return call(LogSumExp(), jax.ShapeDtypeStruct((len(x), 1), jnp.float32), x)


@dataclasses.dataclass(frozen=True)
class Norm:
    """The kernel of `rms_norm`, and with `centered` of `layer_norm`."""

    dtype: str
    weight_dtype: str
    eps: float
    centered: bool = False
    biased: bool = False

    @property
    def name(self) -> str:
        """See `cpu.Kernel`."""
        what = ("layer_norm_bias" if self.biased else "layer_norm") if self.centered else "rms_norm"
        eps = f"{np.float32(self.eps).view(np.uint32):08x}"
        return f"llvm_{what}_{self.dtype}_{self.weight_dtype}_{eps}"

    def write(self, module: Module, features: frozenset[str]) -> None:
        """See `cpu.Kernel`."""
        count = 3 if self.biased else 2
        handler(module, self.name, count, 1, lambda call: self._write_handler(call, "avx512bf16" in features))

    def _write_handler(self, call: Call, has_bf16: bool) -> None:
        f = call.function
        x, weight, *bias = call.arguments
        rows, dim = x.dim(0), x.dim(1)
        per_item = f.constant(I64, _ITEM_NUMBERS) // dim + 1
        captured = [x.data, weight.data, call.results[0].data, rows, dim, weight.dim(0), per_item]

        def work(f: Function, item: Value, *captured: Value) -> None:
            x, weight, out, rows, dim, weights, per_item, *bias = captured
            size, weight_size = _SIZES[self.dtype], _SIZES[self.weight_dtype]

            def row(r: Value) -> None:
                own, to = (f.at(pointer, r * dim * size) for pointer in (x, out))
                factors = [f.at(pointer, r % weights * dim * weight_size) for pointer in (weight, *bias)]
                self._row(f, own, factors, to, dim, has_bf16)

            f.loop(f.minimum((item + 1) * per_item, rows), row, start=item * per_item)

        call.parallel_for((rows + per_item - 1) // per_item, [*captured, *(one.data for one in bias)], work)

    def _row(self, f: Function, x: Value, factors: list[Value], out: Value, dim: Value, has_bf16: bool) -> None:
        weight, *bias = factors

        def mean(add: Callable[[Value, Value], Value]) -> Value:
            (total,) = f.loop(dim, add, f.constant(_NUMBERS, 0.0), step=_LANES)
            return maths.reduce_lanes(f, total, operator.add) / f.broadcast(f.convert("sitofp", dim, F32), _LANES)

        center = mean(lambda at, total: total + _load(f, x, at, self.dtype)) if self.centered else None

        def load(at: Value) -> Value:
            number = _load(f, x, at, self.dtype)
            return number if center is None else number - center

        def add_square(at: Value, total: Value) -> Value:
            number = load(at)
            return f.fma(number, number, total)

        root = f.call("llvm.sqrt.v16f32", _NUMBERS, mean(add_square) + self.eps)
        inverse = f.constant(_NUMBERS, 1.0) / root
        to_bf16: Callable[[Value], Value] = f.to_bf16 if has_bf16 else lambda x: maths.to_bf16(f, x)

        def scale(at: Value) -> None:
            number = load(at) * inverse
            if not self.centered and self.weight_dtype == "bfloat16":
                number = maths.from_bf16(f, f.convert("bitcast", to_bf16(number), _HALVES))
            number = number * _load(f, weight, at, self.weight_dtype)
            for one in bias:
                number = number + _load(f, one, at, self.weight_dtype)
            f.store(number if self.dtype == "float32" else to_bf16(number), out, at * _SIZES[self.dtype])

        f.loop(dim, scale, step=_LANES)


def _load(f: Function, pointer: Value, at: Value, dtype: str) -> Value:
    if dtype == "float32":
        return f.load(_NUMBERS, pointer, at * 4)
    return maths.from_bf16(f, f.load(_HALVES, pointer, at * 2))


@dataclasses.dataclass(frozen=True)
class LogSumExp:
    """The kernel of `log_sum_exp`."""

    @property
    def name(self) -> str:
        """See `cpu.Kernel`."""
        return "llvm_log_sum_exp"

    def write(self, module: Module, features: frozenset[str]) -> None:
        """See `cpu.Kernel`."""
        handler(module, self.name, 1, 1, _write_handler)


def _write_handler(call: Call) -> None:
    x = call.arguments[0]
    call.parallel_for(x.dim(0), [x.data, call.results[0].data, x.dim(1)], _log_sum_exp)


def _log_sum_exp(f: Function, row: Value, x: Value, out: Value, count: Value) -> None:
    own = f.at(x, row * count * 4)
    whole = count // _BLOCK * _BLOCK
    # The end of the row that fills no whole block is padded with -inf
    rest = f.stack(_BLOCK * 4)
    for i in range(_VECTORS):
        f.store(f.constant(_NUMBERS, float("-inf")), rest, 64 * i)
    f.call("llvm.memcpy.p0.p0.i64", None, rest, f.at(own, whole * 4), (count - whole) * 4, f.constant(I1, 0))

    def over(operation: Callable[[Value, Value], Value], of: Callable[[Value], Value], zero: float) -> Value:
        def block(pointer: Value, *before: Value) -> list[Value]:
            return [operation(b, of(f.load(_NUMBERS, pointer, 64 * i))) for i, b in enumerate(before)]

        start = [f.constant(_NUMBERS, zero)] * _VECTORS
        chains = f.loop(whole, lambda at, *before: block(f.at(own, at * 4), *before), *start, step=_BLOCK)
        a, b, c, d = block(rest, *chains)
        return maths.reduce_lanes(f, operation(operation(a, b), operation(c, d)), operation)

    peak = over(f.maximum, lambda x: x, -3e38)
    total = over(operator.add, lambda x: maths.exp(f, x - peak), 0.0)
    result = f.stack(_NUMBERS.nbytes)
    f.store(maths.log(f, total) + peak, result)
    f.store(f.load(F32, result), out, row * 4)
