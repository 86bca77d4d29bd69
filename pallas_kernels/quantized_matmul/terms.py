"""Writes numbers of more than 8 bits as sums of bfloat16, which tensor cores multiply exactly."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float

# How many terms of bfloat16, whose significand has eight bits, hold a number of each type.
TERMS = {jnp.dtype(jnp.bfloat16): 1, jnp.dtype(jnp.float16): 2, jnp.dtype(jnp.float32): 3}


def bfloat16_terms(x: Float[Array, "tokens in_dim"], count: int) -> BFloat16[Array, "terms in_dim"]:
    """Return terms whose sum is `x`: first the largest terms of all rows, then the next ones of all rows."""
    if count == 1:
        return x
    terms, rest = [], x.astype(jnp.float32)
    for _ in range(count):
        # XLA may leave out a conversion there and back, but not this.
        term = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        terms.append(term.astype(jnp.bfloat16))
        rest = rest - term
    return jnp.concatenate(terms)
