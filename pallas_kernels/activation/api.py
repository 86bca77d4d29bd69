"""The public functions: a kernel on a CPU, else plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.activation.cpu import LANES, GatedSilu, Gelu
from pallas_kernels.cpu import call


def gated_silu(both: Float[Array, "tokens two_ffn"]) -> Float[Array, "tokens ffn"]:
    """Return `silu(gate) * up`, where `both` has the gates in its first half, and `up` in the second.

    Each operation rounds to the type of `both`, with the kernel as without it.
    """
    width = both.shape[1] // 2

    def plain(both: Array) -> Array:
        return jax.nn.silu(both[:, :width]) * both[:, width:]

    def kernel(both: Array) -> Array:
        out: Array = call(GatedSilu(), jax.ShapeDtypeStruct((len(both), width), both.dtype), both)
        return out

    is_supported = both.dtype == jnp.bfloat16 and width % LANES == 0
    return dispatch.on_cpu(kernel if is_supported else None, plain, both)


def gelu(x: Float[Array, "tokens ffn"]) -> Float[Array, "tokens ffn"]:
    """Return `x` times the share of a normal distribution below it (Hendrycks and Gimpel 2016), with an absolute error
    of 1e-7 of `x`, rounded once to its type."""

    def plain(x: Array) -> Array:
        return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)

    def kernel(x: Array) -> Array:
        out: Array = call(Gelu(x.dtype == jnp.bfloat16), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return out

    is_supported = x.dtype in (jnp.bfloat16, jnp.float32) and x.shape[1] % LANES == 0
    return dispatch.on_cpu(kernel if is_supported else None, plain, x)
