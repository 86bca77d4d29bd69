"""Products of each head's vectors by the head's own weight, packed for a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.linear import linear_by_head
from pallas_kernels.cpu import refusal
from pallas_kernels.quantized_matmul import PackedWeight, pack_dense, packed_shape

pytestmark = pytest.mark.skipif(refusal() is not None, reason="this machine can't compile kernels")

HEADS, OUTPUTS, INPUTS = 4, 48, 64


def test_a_token_has_the_same_bits_alone_and_beside_others() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((21, HEADS, INPUTS)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((HEADS, OUTPUTS, INPUTS)), jnp.bfloat16)
    strips, *run = packed_shape(OUTPUTS, INPUTS, "bf16")
    data = np.zeros((HEADS * strips, *run), np.uint8)
    pack_dense(np.asarray(weight).reshape(-1, INPUTS), data)
    held = PackedWeight(jnp.asarray(data.reshape(HEADS, strips, *run)))
    multiply = jax.jit(lambda x: linear_by_head(x, held))
    together = np.asarray(multiply(x))
    wide = np.einsum("thi,hoi->tho", np.asarray(x, np.float64), np.asarray(weight, np.float64))
    np.testing.assert_allclose(together.astype(np.float64), wide, rtol=0.01, atol=0.1)
    for first, count in ((0, 1), (4, 1), (7, 3)):
        np.testing.assert_array_equal(multiply(x[first : first + count]), together[first : first + count])
