"""One draw a row on a CPU: temperature, top_k, top_p, min_p and Gumbel-max, in passes over a row that stays in cache.

One thread handles a row and adds in a fixed order, so that a draw doesn't depend on other rows.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels.cpu import call, maths
from pallas_kernels.cpu.emit import Function, Module, Value
from pallas_kernels.cpu.ffi import Call, handler
from pallas_kernels.cpu.types import F32, I1, I8, I32, I64, PTR
from pallas_kernels.sampling.noise import FIRST, GOLDEN, LARGEST, SECOND, SMALL
from pallas_kernels.sampling.parameters import DrawParameters

_LANES = 16
_VECTORS = 4
_BLOCK = _LANES * _VECTORS
_NUMBERS, _BITS = F32.times(_LANES), I32.times(_LANES)
_TINY = 1.1754944e-38


def draw_tokens(
    logits: Float[Array, "rows vocab"],
    keys: UInt32[Array, "rows 2"],
    parameters: DrawParameters,
    live: Bool[Array, " rows"] | None = None,
) -> Int[Array, " rows"]:
    """Compute `reference.draw_tokens`."""
    live = jnp.ones(len(logits), jnp.bool_) if live is None else live
    parameters = parameters._replace(top_k=parameters.top_k.astype(jnp.int32))
    return call(DrawTokens(), jax.ShapeDtypeStruct((len(logits),), jnp.int32), logits, keys, *parameters, live)


@dataclasses.dataclass(frozen=True)
class DrawTokens:
    """The kernel of `draw_tokens`."""

    @property
    def name(self) -> str:
        """See `cpu.Kernel`."""
        return "llvm_draw_tokens"

    def write(self, module: Module, features: frozenset[str]) -> None:
        """See `cpu.Kernel`."""
        handler(module, self.name, 3 + len(DrawParameters._fields), 1, _write_handler)


def _write_handler(call: Call) -> None:
    logits, *arguments = call.arguments
    pointers = [logits.data, *(argument.data for argument in arguments), call.results[0].data]
    call.parallel_for(logits.dim(0), [logits.dim(1), *pointers], _draw_row)


def _draw_row(f: Function, row: Value, vocab: Value, *pointers: Value) -> None:
    *arguments, live, out = pointers
    f.store(f.constant(I32, 0), out, row * 4)
    is_idle = f.load(I8, live, row).equals(0)
    f.when(is_idle, lambda: None, lambda: _draw_live_row(f, row, vocab, *arguments, out))


def _draw_live_row(f: Function, row: Value, vocab: Value, *pointers: Value) -> None:
    logits, keys, temperatures, top_ks, top_ps, min_ps, out = pointers
    temperature, top_p, min_p = (f.load(F32, column, row * 4) for column in (temperatures, top_ps, min_ps))
    padded = (vocab + (_BLOCK - 1)) // _BLOCK * _BLOCK
    memory = f.call("malloc", PTR, padded * 4)
    _copy(f, f.at(logits, row * vocab * 4), memory, vocab, padded)
    numbers = _RowBuffer(f, memory, padded)

    def draw() -> None:
        numbers.logits_to_weights(temperature)
        top_k = f.load(I32, top_ks, row * 4)
        f.when(top_k > 0, lambda: numbers.keep_top_k(top_k))
        f.when(top_p < 1.0, lambda: numbers.keep_top_p(top_p))
        least, *key = (f.broadcast(x, _LANES) for x in (min_p, *(f.load(I32, keys, row * 8 + at) for at in (0, 4))))

        def score(ids: Value, weight: Value) -> Value:
            return f.select(weight >= least, weight, 0.0) / _exponential_noise(f, ids, *key)

        f.store(numbers.argmax(score), out, row * 4)

    def choose() -> None:
        f.store(numbers.argmax(lambda _, logit: logit), out, row * 4)

    f.when(temperature > 0.0, draw, choose)
    f.call("free", None, memory)


def _copy(f: Function, source: Value, to: Value, count: Value, padded: Value) -> None:
    """Copy a row, padded with -inf: the padding is never drawn."""
    f.call("llvm.memcpy.p0.p0.i64", None, to, source, count * 4, f.constant(I1, 0))
    f.loop(padded, lambda i: f.store(f.constant(F32, float("-inf")), to, i * 4), start=count)


@dataclasses.dataclass(frozen=True)
class _RowBuffer:
    """The numbers of one row in memory, padded to whole blocks."""

    f: Function
    memory: Value
    count: Value

    def _loop(self, body: Callable[..., Sequence[Value]], *start: Value) -> list[list[Value]]:
        """Run `body(at, numbers, *carried)` for each vector, in as many chains as a block has vectors.

        Returns the last carried values of each chain.
        """
        f, width = self.f, len(start)

        def block(at: Value, *carried: Value) -> list[Value]:
            out: list[Value] = []
            for i in range(_VECTORS):
                place = at + i * _LANES
                out += body(place, f.load(_NUMBERS, self.memory, place * 4), *carried[i * width : (i + 1) * width])
            return out

        done = f.loop(self.count, block, *start * _VECTORS, step=_BLOCK)
        return [done[i * width : (i + 1) * width] for i in range(_VECTORS)]

    def _reduce(self, operation: Callable[[Value, Value], Value], of: Callable[[Value], Value], zero: Value) -> Value:
        """Reduce the whole row; every lane holds the result."""
        (a,), (b,), (c,), (d,) = self._loop(lambda _, x, before: [operation(before, of(x))], zero)
        return maths.reduce_lanes(self.f, operation(operation(a, b), operation(c, d)), operation)

    def _map(self, to: Callable[[Value], Value]) -> None:
        def one(at: Value, x: Value) -> Sequence[Value]:
            self.f.store(to(x), self.memory, at * 4)
            return ()

        self._loop(one)

    def logits_to_weights(self, temperature: Value) -> None:
        """Replace logits by unnormalized probabilities, of which the largest is 1."""
        f = self.f
        peak = self._reduce(f.maximum, lambda x: x, f.constant(_NUMBERS, float("-inf")))
        scale = f.broadcast(temperature, _LANES)
        self._map(lambda x: maths.exp(f, (x - peak) / scale))

    def keep_top_k(self, top_k: Value) -> None:
        """Set all weights to 0 but the `top_k` largest and those equal to the last one."""
        f = self.f
        wanted, zero = f.broadcast(top_k, _LANES), f.constant(_BITS, 0)

        def enough(bound: Value) -> Value:
            count = self._reduce(operator.add, lambda x: f.convert("zext", _bits(f, x) >= bound, _BITS), zero)
            return count >= wanted

        self._keep_from(self._largest_bound(enough))

    def keep_top_p(self, top_p: Value) -> None:
        """Set all weights to 0 but the largest that sum to `top_p` of the total, and those equal to the last one."""
        f = self.f
        zero = f.constant(_NUMBERS, 0.0)
        # A top_p too small for a float32 would keep nothing at all.
        wanted = f.broadcast(f.maximum(top_p, _TINY), _LANES) * self._reduce(operator.add, lambda x: x, zero)

        def enough(bound: Value) -> Value:
            total = self._reduce(operator.add, lambda x: f.select(_bits(f, x) >= bound, x, 0.0), zero)
            return total >= wanted

        self._keep_from(self._largest_bound(enough))

    def _largest_bound(self, enough: Callable[[Value], Value]) -> Value:
        """Return, in every lane, the bits of the largest number for which `enough` holds.

        Floats of one sign order as their bits do, so 31 passes find it exactly.
        """
        f = self.f

        def refine(i: Value, found: Value) -> Value:
            bit = f.broadcast(f.convert("trunc", f.constant(I64, 1) << (30 - i), I32), _LANES)
            candidate = found | bit
            return f.select(enough(candidate), candidate, found)

        return f.loop(31, refine, f.constant(_BITS, 0))[0]

    def _keep_from(self, bound: Value) -> None:
        self._map(lambda x: self.f.select(_bits(self.f, x) >= bound, x, 0.0))

    def argmax(self, score: Callable[[Value, Value], Value]) -> Value:
        """Return the token of the largest `score(ids, numbers)`; of equal scores, the lowest token."""
        f = self.f
        lanes = f.constant(_BITS, range(_LANES))

        def one(at: Value, x: Value, high: Value, token: Value) -> list[Value]:
            ids = f.broadcast(f.convert("trunc", at, I32), _LANES) + lanes
            scores = score(ids, x)
            better = scores > high
            return [f.select(better, scores, high), f.select(better, ids, token)]

        chains = self._loop(one, f.constant(_NUMBERS, float("-inf")), f.constant(_BITS, 0))
        high, token = chains[0]
        for other, ids in chains[1:]:
            high, token = _larger_score(f, other, ids, high, token)
        step = _LANES // 2
        while step:
            lanes_there = [i ^ step for i in range(_LANES)]
            other, ids = (f.shuffle(x, x, lanes_there) for x in (high, token))
            high, token = _larger_score(f, other, ids, high, token)
            step //= 2
        found = f.stack(_BITS.nbytes)
        f.store(token, found)
        return f.load(I32, found)


def _larger_score(f: Function, score: Value, ids: Value, high: Value, token: Value) -> tuple[Value, Value]:
    """Return the larger score and its token; of equal scores, the lower token."""
    wins = (score > high) | (score.equals(high) & (ids < token))
    return f.select(wins, score, high), f.select(wins, ids, token)


def _bits(f: Function, x: Value) -> Value:
    return f.convert("bitcast", x, _BITS)


def _exponential_noise(f: Function, ids: Value, key: Value, other: Value) -> Value:
    """Compute `noise.exponential_noise`."""
    golden, first, second = (number - 2**32 if number >= 2**31 else number for number in (GOLDEN, FIRST, SECOND))
    x = f.binary("xor", ids, other) * golden + key
    x = f.binary("xor", x, x >> 16) * first
    x = f.binary("xor", x, x >> 15) * second
    bits = f.binary("xor", x, x >> 16)
    number = f.convert("sitofp", bits >> 1, _NUMBERS)
    p = f.minimum(f.fma(number, f.constant(_NUMBERS, 2.0**-31), f.constant(_NUMBERS, 2.0**-33)), LARGEST)
    series = f.fma(p * 0.5, p, p)
    return f.select(p < SMALL, series, 0.0 - maths.log(f, 1.0 - p))
