"""The noise of a draw: the contract of the kernels that draw.

Gumbel-max takes `argmax(log(weight) + noise)`, where the noise is `-log(e)` of an exponentially distributed `e`. This
is the token of the largest `weight / e`. The noise depends on its row's key and its token's id alone. So a change in
the last bits of a weight changes the draw only if two tokens score practically the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

# 2^32 divided by the golden ratio, and the multipliers of Wellons' lowbias32
GOLDEN, FIRST, SECOND = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
# Up to here `-log(1 - p)` is computed by its series, as 1 - p has no room for more digits
SMALL = 2.0**-10
LARGEST = 1 - 2.0**-24


def exponential_noise(keys: UInt32[Array, "rows 2"], ids: UInt32[Array, " tokens"]) -> Float[Array, "rows tokens"]:
    """Return exponentially distributed numbers of mean 1, between 1e-10 and 17. `keys` are random bits."""
    return noise_of(keys[:, :1], keys[:, 1:], ids[None])


def noise_of(key: jax.Array, other: jax.Array, ids: jax.Array) -> jax.Array:
    """Return `exponential_noise` for the halves `key` and `other` of keys, and ids: all are uint32 and broadcast."""
    x = (ids ^ other) * jnp.uint32(GOLDEN) + key
    x = (x ^ (x >> 16)) * jnp.uint32(FIRST)
    x = (x ^ (x >> 15)) * jnp.uint32(SECOND)
    bits = x ^ (x >> 16)
    # Small numbers are as fine as a float32 can be: the tokens with the smallest ones win
    p = jnp.minimum((bits >> 1).astype(jnp.int32).astype(jnp.float32) * 2.0**-31 + 2.0**-33, LARGEST)
    return jnp.where(p < SMALL, p + 0.5 * p * p, -jnp.log(1 - p))
