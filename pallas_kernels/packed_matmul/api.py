"""The public function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float

from pallas_kernels.cpu import call
from pallas_kernels.packed_matmul.cpu import PackedMatmul
from pallas_kernels.packed_matmul.layout import BLOCK, STRIP, PackedWeight


def packed_matmul(x: BFloat16[Array, "tokens in_dim"], weight: PackedWeight) -> Float[Array, "tokens out_dim"]:
    """Return `x @ weight.T` with float32 sums, on a CPU."""
    tokens, in_dim = x.shape
    strips, blocks, _ = weight.data.shape
    assert in_dim == blocks * BLOCK, (x.shape, weight.shape)
    out_dim = strips * STRIP
    return call(PackedMatmul(weight.bits), jax.ShapeDtypeStruct((tokens, out_dim), jnp.float32), x, weight.data)
