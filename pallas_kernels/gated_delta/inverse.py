"""The inverse of a triangular matrix inside kernels, by products of matrices."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

# Of a block of this size, the inverse is a short product of powers.
_LEAST = 8


def inverse(below: Float32[Array, "n n"], dot: Callable[[Array, Array], Array]) -> Float32[Array, "n n"]:
    """Return the inverse of 1 + `below`, which is zero on and above the diagonal. `n` is a power of two from 8 on.

    The inverse of small blocks on the diagonal is a product of powers. Those of blocks of twice the size follow from
    it, until there is one block. Powers of larger blocks would be large, and their sums inaccurate.
    """
    row, column = (lax.broadcasted_iota(jnp.int32, below.shape, axis) for axis in (0, 1))

    def same(block: int) -> Array:
        return lax.div(row, block) == lax.div(column, block)

    one = jnp.where(row == column, 1.0, 0.0)
    power = jnp.where(same(_LEAST), below, 0.0)
    found = one - power
    for _ in range(2):
        power = dot(power, power)
        found = dot(found, one + power)
    block = _LEAST
    while block < below.shape[0]:
        across = jnp.where(same(2 * block) & ~same(block), below, 0.0)
        found = found - dot(dot(found, across), found)
        block *= 2
    return found
