"""RMS norms and log-sum-exps against float64 numpy, and their independence of other rows."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import call
from pallas_kernels.cpu.emit import Module
from pallas_kernels.normalization import log_sum_exp, rms_norm, supports_rms_norm
from pallas_kernels.normalization.cpu import RmsNorm

RNG = np.random.default_rng(0)
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class WithoutFeatures(RmsNorm):
    """The kernel for a CPU without optional features."""

    @property
    def name(self) -> str:
        return f"{super().name}_old"

    def write(self, module: Module, features: frozenset[str]) -> None:
        super().write(module, frozenset())


def _normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    scaled = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS)
    return scaled.astype(x.dtype).astype(np.float64) * weight.astype(np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 16), (3, 2, 48), (700, 576), (2, 3, 5, 64)], ids=str)
def test_rms_norm(dtype: str, shape: tuple[int, ...]) -> None:
    x = (RNG.standard_normal(shape) * 3).astype(dtype)
    weight = RNG.standard_normal(shape[-2:] if len(shape) == 4 else shape[-1:]).astype(dtype)
    found = jax.jit(functools.partial(rms_norm, eps=EPS))(x, weight)
    assert found.dtype == x.dtype
    tolerance = 1e-6 if dtype == "float32" else 2**-7
    np.testing.assert_allclose(np.asarray(found, np.float64), _normed(x, weight), rtol=tolerance, atol=1e-6)


def test_rms_norm_without_instructions_for_bfloat16() -> None:
    x, weight = (RNG.standard_normal(shape).astype(jnp.bfloat16) for shape in ((9, 80), (1, 80)))
    found = call(WithoutFeatures("bfloat16", EPS), jax.ShapeDtypeStruct(x.shape, x.dtype), jnp.asarray(x), weight)
    np.testing.assert_array_equal(found, rms_norm(jnp.asarray(x), jnp.asarray(weight[0]), EPS))


def test_unsupported_sizes_and_dtypes() -> None:
    x = jnp.zeros((2, 24))
    assert not supports_rms_norm(x, x[0])
    assert not supports_rms_norm(jnp.zeros((2, 32)), jnp.zeros(32, jnp.bfloat16))


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
    normed, summed = (np.asarray(f(jnp.asarray(x))) for f in (lambda x: rms_norm(x, weight, EPS), _logs))
    for first, last in ((7, 8), (3, 20)):
        some = jnp.asarray(x[first:last])
        np.testing.assert_array_equal(rms_norm(some, weight, EPS), normed[first:last])
        np.testing.assert_array_equal(_logs(some), summed[first:last])


def _logs(x: jax.Array) -> jax.Array:
    return log_sum_exp(x.astype(jnp.float32))
