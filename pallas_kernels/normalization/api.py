"""The public functions: kernels on a CPU, else plain XLA.

Root mean square normalization is that of Zhang and Sennrich 2019, layer normalization that of Ba, Kiros and Hinton
2016.
"""

from __future__ import annotations

import functools

from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.normalization import cpu, reference


def rms_norm(x: Float[Array, "... dim"], weight: Float[Array, "... dim"], eps: float) -> Float[Array, "... dim"]:
    """Scale the last dimension to unit mean square, in float32, then by `weight` (it may broadcast) in `x`'s dtype.

    A float32 `weight` is multiplied in float32, before the only rounding to `x`'s dtype.
    """
    kernel, otherwise = (functools.partial(module.rms_norm, eps=eps) for module in (cpu, reference))
    return dispatch.on_cpu(kernel if cpu.supports_norm(x, weight) else None, otherwise, x, weight)


def layer_norm(
    x: Float[Array, "... dim"], weight: Float[Array, "... dim"], bias: Float[Array, "... dim"] | None, eps: float
) -> Float[Array, "... dim"]:
    """Shift and scale the last dimension to mean 0 and variance 1, multiply by `weight` and add `bias`.

    All of it is in float32; the result is rounded to `x`'s dtype. `weight` and `bias` have one dtype and may broadcast.
    """
    factors = (weight,) if bias is None else (weight, bias)
    kernel, otherwise = (functools.partial(module.layer_norm, eps=eps) for module in (cpu, reference))
    return dispatch.on_cpu(kernel if cpu.supports_norm(x, weight) else None, otherwise, x, *factors)


def log_sum_exp(x: Float[Array, "rows some"]) -> Float[Array, "rows 1"]:
    """Return the logarithm of the sum of the exponentials of each row."""
    return dispatch.on_cpu(cpu.log_sum_exp, reference.log_sum_exp, x)
