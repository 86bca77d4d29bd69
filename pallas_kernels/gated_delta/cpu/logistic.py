"""The logistic function and its integral, of 16 numbers."""

from __future__ import annotations

from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.maths import ROUNDER, exp, log
from pallas_kernels.cpu.types import I16, I32

_LOWEST = -87.0
_LOG2_E = 1.4426950408889634

# 2^r = 1 + r * p(r) for |r| <= 1 / 2, with a relative error of 1.1e-7: fitted to it
_POWER = (0.693147, 0.24022242, 0.055507336, 0.009671513, 0.0013264727)


def sigmoid(f: Function, x: Value, features: frozenset[str]) -> Value:
    """Return `1 / (1 + exp(-x))` of 16 numbers; 1e-38 below -87.

    The relative error is 4e-7 for x above -10, and up to 3e-6 below. Each instruction waits for the one before, so
    there are few.
    """
    held = f.maximum(f.minimum(x, -_LOWEST), _LOWEST)
    scale, rounder = f.constant(x.type, -_LOG2_E), f.constant(x.type, ROUNDER)
    shifted = f.fma(held, scale, rounder)
    r = f.fma(held, scale, rounder - shifted)
    square = r * r
    a, b, c, d, e = (f.constant(x.type, number) for number in _POWER)
    p = f.fma(square, f.fma(square, e, f.fma(r, d, c)), f.fma(r, b, a))
    bits = I32.times(x.type.lanes)
    power = f.convert("bitcast", f.fma(p, r, f.constant(x.type, 1.0)), bits)
    scaled = power + (f.convert("bitcast", shifted, bits) << 23)
    below = f.convert("bitcast", scaled, x.type) + 1.0
    one = f.constant(x.type, 1.0)
    if "avx512f" not in features:
        return one / below
    # A division takes as long as the rest. This is right to 14 bits, and to 28 after a step of Newton's.
    near = f.call("llvm.x86.avx512.rcp14.ps.512", x.type, below, one, f.constant(I16, -1))
    return f.fma(f.fma(0.0 - below, near, one), near, near)


def softplus(f: Function, x: Value) -> Value:
    """Return `log(1 + exp(x))`, with a relative error of 3e-7; 0 below -87."""
    small = exp(f, f.minimum(x, 0.0 - x))
    total = small + 1.0
    # The logarithm of the rounded sum, times what rounding changed (as in Kahan's log1p)
    kept = total - 1.0
    is_lost = kept.equals(0.0)
    ratio = small / f.select(is_lost, f.constant(x.type, 1.0), kept)
    return f.maximum(x, 0.0) + f.select(is_lost, small, log(f, total) * ratio)
