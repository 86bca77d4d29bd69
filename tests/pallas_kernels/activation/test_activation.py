"""The activations against their definitions in float64."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.activation import gated_silu, gelu

EDGES = [0.0, -0.0, 87.0, 89.0, 200.0, -87.0, -89.0, -200.0, 1e30, -3e38, float("inf"), float("nan")]


# Of a width that the kernel takes, and one that it leaves to XLA; of one item, and several
@pytest.mark.parametrize(("tokens", "width"), [(1, 48), (33, 1536), (5, 24)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_equals_the_definition(dtype: str, tokens: int, width: int) -> None:
    both = np.random.default_rng(0).standard_normal((tokens, 2 * width)) * 8
    both[-1, : len(EDGES)] = EDGES
    x = jnp.asarray(both, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = np.asarray(x, np.float64)
        gate, up = exact[:, :width], exact[:, width:]
        expected = gate / (1 + np.exp(-gate)) * up
    given = jax.jit(gated_silu)(x)
    assert given.dtype == x.dtype
    # The exponential, its sum with 1, the sigmoid, its product with the gate, and the result are rounded.
    tolerance = {"float32": 1e-5, "bfloat16": 5 * 2**-8}[dtype]
    np.testing.assert_allclose(np.asarray(given, np.float64), expected, rtol=tolerance, atol=1e-30)


def test_every_bfloat16_gives_what_xla_computes() -> None:
    gates = jax.lax.bitcast_convert_type(jnp.arange(1 << 16, dtype=jnp.uint16), jnp.bfloat16)
    gates = jnp.where(jnp.abs(gates) < 88, gates, 0).reshape(64, -1)
    both = jnp.concatenate([gates, jnp.full_like(gates, 1.7)], axis=1)
    given, plain = jax.jit(gated_silu)(both), jax.jit(lambda x: jax.nn.silu(x[:, :1024]) * x[:, 1024:])(both)
    np.testing.assert_allclose(np.asarray(given, np.float32), np.asarray(plain, np.float32), rtol=2**-7, atol=1e-30)
    # Exponentials of 1e-7 more or less seldom lie on both sides of a tie.
    assert (np.asarray(given) != np.asarray(plain)).mean() < 1e-3


def test_a_row_does_not_depend_on_other_rows() -> None:
    x = jnp.asarray(np.random.default_rng(1).standard_normal((40, 2 * 1536)), jnp.bfloat16)
    many = np.asarray(jax.jit(gated_silu)(x))
    np.testing.assert_array_equal(jax.jit(gated_silu)(x[17:18]), many[17:18])


@pytest.mark.parametrize(("tokens", "width"), [(1, 48), (33, 1536), (5, 24)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gelu_equals_its_definition(dtype: str, tokens: int, width: int) -> None:
    given = np.random.default_rng(0).standard_normal((tokens, width)) * 3
    given[-1, : len(EDGES)] = EDGES
    x = jnp.asarray(given, dtype)
    exact = np.asarray(x, np.float64)
    with np.errstate(invalid="ignore"):
        expected = exact * (1 + np.vectorize(math.erf)(exact * math.sqrt(0.5))) / 2
    expected[exact < -30] = 0.0
    found = jax.jit(gelu)(x)
    assert found.dtype == x.dtype
    finite, numbers = np.isfinite(exact), np.asarray(found, np.float64)
    error = np.abs(numbers[finite] - expected[finite])
    bound = np.abs(expected) * {"float32": 3e-7, "bfloat16": 2**-8}[dtype] + np.abs(exact).clip(max=30) * 2e-7
    assert (error <= bound[finite]).all()
    np.testing.assert_array_equal(numbers[~finite], expected[~finite])
