"""The norms of layers, by the kernel and by XLA, against float64 numpy: how often they round, and in which order."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.norm import layer_norm, rms_norm
from pallas_kernels.normalization import cpu

RNG = np.random.default_rng(0)
EPS = 1e-5
DTYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")]


@pytest.fixture(params=["kernel", "xla"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute by the kernel, and by the operations of other devices."""
    if request.param == "xla":
        monkeypatch.setattr(cpu, "supports_norm", lambda x, weight: False)


def _random(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def _assert_equal(found: Any, expected: np.ndarray, dtype: str) -> None:
    """Allow for float32 sums: numbers of bfloat16 seldom round to a neighbour because of them."""
    assert found.dtype.name == dtype
    tolerance = 3e-6 if dtype == "float32" else 2**-7
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=tolerance, atol=1e-5)
    if dtype == "bfloat16":
        assert np.mean(np.asarray(found) == expected.astype(dtype)) > 0.99


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
def test_rms_norm(dtype: str, weight_dtype: str) -> None:
    x, weight = _random((40, 48), dtype) * 3, _random((48,), weight_dtype)
    wide = x.astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS)
    if weight_dtype != "float32":
        normed = normed.astype(dtype).astype(np.float64)
    _assert_equal(rms_norm(jnp.asarray(x), jnp.asarray(weight), EPS), normed * weight.astype(np.float64), dtype)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
def test_layer_norm(dtype: str, weight_dtype: str, biased: bool) -> None:
    x, (weight, bias) = _random((40, 48), dtype) * 3 + 2, (_random((48,), weight_dtype) for _ in range(2))
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + EPS)
    expected = expected * weight.astype(np.float64) + (bias.astype(np.float64) if biased else 0)
    found = layer_norm(jnp.asarray(x), jnp.asarray(weight), jnp.asarray(bias) if biased else None, EPS)
    _assert_equal(found, expected, dtype)


@pytest.mark.parametrize("function", [rms_norm, functools.partial(layer_norm, bias=None)], ids=["rms", "layer"])
def test_a_cpu_takes_the_kernel(function: Any) -> None:
    x, weight = jnp.zeros((2, 32), jnp.bfloat16), jnp.ones(32)
    assert cpu.supports_norm(x, weight)
    assert "llvm_" in jax.jit(functools.partial(function, weight=weight, eps=EPS)).lower(x).as_text()
