"""Functions of float32 vectors that no CPU has as an instruction, and operations across their lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.types import F32, I16, I32

_LOWEST = -87.0
# Adding this rounds to an integer, which is then in the lowest bits.
ROUNDER = 1.5 * 2**23
_LOG2_HIGH, _LOG2_LOW = 0.693359375, -2.12194440e-4
# exp(r) = 1 + r + r^2 * p(r) for |r| <= log(2) / 2, as Cephes has it
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)

# log(1 + r) = r - r^2 / 2 + r^3 * p(r) for 1 + r between sqrt(1/2) and sqrt(2), as Cephes has it
_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
_SQRT_HALF = 0.707106781186547524


def exp(f: Function, x: Value) -> Value:
    """Return the exponential, with a relative error of 1e-7 up to x = 88; exactly 0 below -87."""
    held = f.select(x < _LOWEST, f.constant(x.type, _LOWEST), x)  # NaN stays
    shifted = f.fma(held, f.constant(x.type, 1.4426950408889634), f.constant(x.type, ROUNDER))
    whole = shifted - ROUNDER
    r = f.fma(whole, f.constant(x.type, -_LOG2_HIGH), held)
    r = f.fma(whole, f.constant(x.type, -_LOG2_LOW), r)
    p = f.constant(x.type, _EXP[0])
    for coefficient in _EXP[1:]:
        p = f.fma(p, r, f.constant(x.type, coefficient))
    bits = I32.times(x.type.lanes)
    y = f.fma(p, r * r, r) + 1.0
    scaled = f.convert("bitcast", y, bits) + (f.convert("bitcast", shifted, bits) << 23)
    y = f.convert("bitcast", scaled, x.type)
    return f.select(x < _LOWEST, f.constant(x.type, 0.0), y)


def log(f: Function, x: Value) -> Value:
    """Return the logarithm of positive normal numbers. The error is up to 1e-7 of it; near 1, up to 1e-7 of `1 - x`."""
    bits = f.convert("bitcast", x, I32.times(x.type.lanes))
    exponent = f.convert("sitofp", (bits >> 23) - 126, x.type)
    mantissa = f.convert("bitcast", (bits & 0x7FFFFF) | 0x3F000000, x.type)
    small = mantissa < _SQRT_HALF
    exponent = f.select(small, exponent - 1.0, exponent)
    r = f.select(small, mantissa + mantissa, mantissa) - 1.0
    p = f.constant(x.type, _LOG[0])
    for coefficient in _LOG[1:]:
        p = f.fma(p, r, f.constant(x.type, coefficient))
    square = r * r
    y = f.fma(exponent, f.constant(x.type, _LOG2_LOW), p * r * square)
    y = f.fma(square, f.constant(x.type, -0.5), y)
    return f.fma(exponent, f.constant(x.type, _LOG2_HIGH), r + y)


def tanh(f: Function, x: Value) -> Value:
    """Return the hyperbolic tangent, with an absolute error of 1e-7."""
    e = exp(f, f.minimum(x + x, 80.0))
    return 1.0 - f.constant(x.type, 2.0) / (e + 1.0)


def reduce_lanes(f: Function, x: Value, operation: Callable[[Value, Value], Value]) -> Value:
    """Reduce all lanes by an operation; every lane holds the result."""
    lanes = x.type.lanes
    step = lanes // 2
    while step:
        x = operation(x, f.shuffle(x, x, [i ^ step for i in range(lanes)]))
        step //= 2
    return x


def lane_sums(f: Function, vectors: Sequence[Value]) -> Value:
    """Return a vector of the sums of 16 vectors of 16 lanes."""

    def folded(pair: Sequence[Value], low: Sequence[int], high: Sequence[int]) -> Value:
        return f.shuffle(pair[0], pair[1], low) + f.shuffle(pair[0], pair[1], high)

    def by_quarter(pattern: Sequence[int]) -> list[int]:
        return [4 * quarter + i for quarter in range(4) for i in pattern]

    for low, high in (
        (by_quarter((0, 16, 1, 17)), by_quarter((2, 18, 3, 19))),
        (by_quarter((0, 1, 16, 17)), by_quarter((2, 3, 18, 19))),
        ([*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]),
        (
            [*range(4), *range(8, 12), *range(16, 20), *range(24, 28)],
            [*range(4, 8), *range(12, 16), *range(20, 24), *range(28, 32)],
        ),
    ):
        vectors = [folded(vectors[i : i + 2], low, high) for i in range(0, len(vectors), 2)]
    return vectors[0]


def transpose(f: Function, rows: Sequence[Value]) -> list[Value]:
    """Return the columns of 16 vectors of 16 lanes."""
    # Exchange lanes, then pairs of lanes within each quarter, then quarters: each of these shuffles is one instruction
    quarters = range(0, 16, 4)
    numbers = [[q + i for q in quarters for i in pattern] for pattern in ((0, 16, 1, 17), (2, 18, 3, 19))]
    twos = [[q + i for q in quarters for i in pattern] for pattern in ((0, 1, 16, 17), (2, 3, 18, 19))]
    places = [[*range(q, q + 4), *range(q + 8, q + 12), *range(q + 16, q + 20), *range(q + 24, q + 28)] for q in (0, 4)]
    fours = []
    for group in quarters:
        a, b, c, d = rows[group : group + 4]
        halves = [(f.shuffle(a, b, lanes), f.shuffle(c, d, lanes)) for lanes in numbers]
        fours.append([f.shuffle(left, right, lanes) for left, right in halves for lanes in twos])
    columns: list[Value] = [rows[0]] * 16
    for i, (a, b, c, d) in enumerate(zip(*fours, strict=True)):
        for j, lanes in enumerate(places):
            left, right = f.shuffle(a, b, lanes), f.shuffle(c, d, lanes)
            for k, outer in enumerate(places):
                columns[i + 4 * j + 8 * k] = f.shuffle(left, right, outer)
    return columns


def from_bf16(f: Function, bits: Value) -> Value:
    """Return the float32 numbers of these bfloat16 bits, i16."""
    wide = f.convert("zext", bits, I32.times(bits.type.lanes)) << 16
    return f.convert("bitcast", wide, F32.times(bits.type.lanes))


def pairs_from_bf16(f: Function, words: Value) -> tuple[Value, Value]:
    """Return the lower and the upper bfloat16 of each word, i32, as float32."""
    kind = F32.times(words.type.lanes)
    return f.convert("bitcast", words << 16, kind), f.convert("bitcast", words & -65536, kind)


def to_bf16(f: Function, x: Value) -> Value:
    """Return the bits, i16, of the nearest bfloat16, ties to even."""
    bits = f.convert("bitcast", x, I32.times(x.type.lanes))
    odd = (bits >> 16) & 1
    rounded = f.select(x.equals(x), bits + odd + 0x7FFF, f.constant(bits.type, 0x7FC00000))
    return f.convert("trunc", rounded >> 16, I16.times(x.type.lanes))
