"""The product of one bfloat16 row on a CPU has its own implementation; it must give the same numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.linear import linear


@pytest.mark.parametrize("in_dim", [64, 576, 1536, 4608, 72, 16])
def test_one_row_is_the_same_product(in_dim: int) -> None:
    """Input widths of one term and of many, and two widths that no number of lanes divides."""
    rng = np.random.default_rng(in_dim)
    x = jnp.asarray(rng.standard_normal((1, in_dim)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((48, in_dim)), jnp.bfloat16)
    bias = jnp.asarray(rng.standard_normal(48), jnp.bfloat16)
    product = jax.jit(lambda x, w, b: linear(x, w, b, out_dtype=jnp.float32))(x, weight, bias)
    wide = [np.asarray(a, np.float64) for a in (x, weight, bias)]
    expected = wide[0] @ wide[1].T + wide[2]
    np.testing.assert_allclose(np.asarray(product), expected, atol=1e-3)


def test_one_row_reads_its_weights_once() -> None:
    """The compiled program doesn't contain XLA's own product of one row, which is 20 times slower."""
    args = jax.ShapeDtypeStruct((1, 576), jnp.bfloat16), jax.ShapeDtypeStruct((960, 576), jnp.bfloat16)
    assert "dot_general" not in jax.jit(linear).lower(*args).as_text()
