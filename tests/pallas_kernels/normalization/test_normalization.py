"""Norms and log-sum-exps against float64 numpy, and their independence of other rows."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import call
from pallas_kernels.cpu.emit import Module
from pallas_kernels.normalization.cpu import Norm, layer_norm, log_sum_exp, rms_norm, supports_norm

RNG = np.random.default_rng(0)
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class WithoutFeatures(Norm):
    """The kernel for a CPU without optional features."""

    @property
    def name(self) -> str:
        return f"{super().name}_old"

    def write(self, module: Module, features: frozenset[str]) -> None:
        super().write(module, frozenset())


DTYPES = pytest.mark.parametrize(
    ("dtype", "weight_dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
SHAPES = pytest.mark.parametrize("shape", [(1, 16), (3, 2, 48), (700, 576), (2, 3, 5, 64)], ids=str)


def _random(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def _weight_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[-2:] if len(shape) == 4 else shape[-1:]


def _assert_equal(found: jax.Array, expected: np.ndarray, dtype: str) -> None:
    """Allow for float32 sums: numbers of bfloat16 seldom round to a neighbour because of them."""
    assert found.dtype.name == dtype
    tolerance = 3e-6 if dtype == "float32" else 2**-7
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=tolerance, atol=1e-5)
    if dtype == "bfloat16":
        assert np.mean(np.asarray(found) == expected.astype(dtype)) > 0.99


@DTYPES
@SHAPES
def test_rms_norm(dtype: str, weight_dtype: str, shape: tuple[int, ...]) -> None:
    x, weight = _random(shape, dtype) * 3, _random(_weight_shape(shape), weight_dtype)
    found = jax.jit(functools.partial(rms_norm, eps=EPS))(x, weight)
    wide = x.astype(np.float64)
    scaled = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS)
    _assert_equal(found, scaled.astype(weight_dtype).astype(np.float64) * weight.astype(np.float64), dtype)


@DTYPES
@SHAPES
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm(dtype: str, weight_dtype: str, shape: tuple[int, ...], biased: bool) -> None:
    x = _random(shape, dtype) * 3 + RNG.uniform(-40, 40, (*shape[:-1], 1)).astype(dtype)
    weight, bias = (_random(_weight_shape(shape), weight_dtype) for _ in range(2))
    found = jax.jit(functools.partial(layer_norm, eps=EPS))(x, weight, bias if biased else None)
    wide = x.astype(np.float64)
    centered = wide - wide.mean(-1, keepdims=True)
    expected = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + EPS) * weight.astype(np.float64)
    if biased:
        expected += bias.astype(np.float64)
    _assert_equal(found, expected, dtype)


def test_the_variance_of_numbers_far_from_zero() -> None:
    """The mean of squares minus the square of the mean would be wrong by several percent."""
    x = jnp.asarray(_random((4, 64), "float32") + 1000)
    found = layer_norm(x, jnp.ones(64), eps=EPS)
    np.testing.assert_allclose(np.var(found, axis=-1), np.ones(4), rtol=1e-3)


@pytest.mark.parametrize(
    "kernel",
    [
        WithoutFeatures("bfloat16", "bfloat16", EPS),
        WithoutFeatures("bfloat16", "float32", EPS),
        WithoutFeatures("bfloat16", "bfloat16", EPS, centered=True, biased=True),
    ],
    ids=lambda kernel: kernel.name,
)
def test_norms_without_instructions_for_bfloat16(kernel: Norm) -> None:
    x, *factors = (jnp.asarray(_random((rows, 80), "bfloat16")) for rows in (9, 1, 1))
    factors = [factor.astype(kernel.weight_dtype) for factor in factors[: 1 + kernel.biased]]
    found = call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), x, *factors)
    norm = layer_norm if kernel.centered else rms_norm
    np.testing.assert_array_equal(found, norm(x, *(factor[0] for factor in factors), eps=EPS))


def test_unsupported_sizes_and_dtypes() -> None:
    x = jnp.zeros((2, 24))
    assert not supports_norm(x, x[0])
    assert not supports_norm(jnp.zeros((2, 32)), jnp.zeros(32, jnp.bfloat16))


@pytest.mark.parametrize("count", [1, 63, 64, 600, 49_153])
def test_log_sum_exp(count: int) -> None:
    x = (RNG.standard_normal((5, count)) * 6).astype(np.float32)
    x[1] -= 1e5
    x[2, count // 2 :] = -np.inf if count > 1 else 0
    wide = x.astype(np.float64)
    peak = wide.max(axis=1, keepdims=True)
    expected = np.log(np.exp(wide - peak).sum(axis=1, keepdims=True)) + peak
    np.testing.assert_allclose(jax.jit(log_sum_exp)(x), expected, rtol=1e-6, atol=1e-6)


def test_a_row_does_not_depend_on_other_rows() -> None:
    x = RNG.standard_normal((40, 576)).astype(jnp.bfloat16)
    weight = jnp.asarray(RNG.standard_normal(576), jnp.bfloat16)
    norms = (functools.partial(norm, weight=weight, eps=EPS) for norm in (rms_norm, layer_norm))
    for function in (*norms, _logs):
        together = np.asarray(function(jnp.asarray(x)))
        for first, last in ((7, 8), (3, 20)):
            np.testing.assert_array_equal(function(jnp.asarray(x[first:last])), together[first:last])


def _logs(x: jax.Array) -> jax.Array:
    return log_sum_exp(x.astype(jnp.float32))
