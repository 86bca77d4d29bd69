"""Compares norm, products, feed-forward and embedding with float64 numpy, on a mesh of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.embedding import embed, logits
from jaxserve.layers.linear import linear, row_parallel
from jaxserve.layers.mlp import MlpParams, mlp
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.vocabulary import mask_padding, shard_index
from tests.runtime.tiny import on_mesh

RNG = np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rms_norm(dtype: str) -> None:
    x, weight = _normal(3, 2, 48).astype(dtype), _normal(48).astype(dtype)
    found = rms_norm(x, weight, 1e-3)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3) * weight.astype(np.float64)
    assert found.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=1e-5 if dtype == "float32" else 3e-2)


@pytest.mark.parametrize("function", [linear, row_parallel])
def test_products(function: Callable[..., Any]) -> None:
    x, weight, bias = _normal(5, 12), _normal(7, 12), _normal(7)
    run = on_mesh(function)
    np.testing.assert_allclose(run(x, weight), x @ weight.T, atol=1e-5)
    np.testing.assert_allclose(run(x, weight, bias), x @ weight.T + bias, atol=1e-5)
    assert run(x.astype("bfloat16"), weight.astype("bfloat16"), bias).dtype == jnp.bfloat16


def test_gated_mlp() -> None:
    x, gate_up, down = _normal(5, 12), _normal(2, 8, 12), _normal(12, 8)
    gate_up_bias, down_bias = _normal(2, 8), _normal(12)
    gate, up = (x @ gate_up[i].T + gate_up_bias[i] for i in range(2))
    expected = (gate / (1 + np.exp(-gate)) * up) @ down.T + down_bias
    np.testing.assert_allclose(on_mesh(mlp)(x, MlpParams(gate_up, down, gate_up_bias, down_bias)), expected, atol=1e-4)


def test_embedding_and_head() -> None:
    table, tokens = _normal(20, 12), np.array([0, 19, 3, 3], np.int32)
    np.testing.assert_array_equal(on_mesh(embed)(tokens, table), table[tokens])
    x = _normal(4, 12)
    np.testing.assert_allclose(on_mesh(logits)(x, table), x @ table.T, atol=1e-5)
    wide = on_mesh(logits)(x.astype("bfloat16"), table.astype("bfloat16"))
    assert wide.dtype == np.float32
    exact = x.astype("bfloat16").astype(np.float64) @ table.astype("bfloat16").astype(np.float64).T
    np.testing.assert_allclose(wide, exact, atol=1e-4)


def test_only_needed_rows_are_changed() -> None:
    x, table = _normal(4, 12), _normal(20, 12)

    def run(x: Any, num_rows: Any) -> Any:
        found = logits(x, table, num_rows, change=jnp.tanh)
        return found, mask_padding(found, 18, num_rows)

    found, masked = on_mesh(run)(x, np.int32(3))
    plain = x @ table.T
    np.testing.assert_allclose(found, np.concatenate([np.tanh(plain[:3]), plain[3:]]), atol=1e-5)
    np.testing.assert_array_equal(np.isinf(masked).sum(axis=1), [2, 2, 2, 0])


def test_tokens_of_other_shards_have_an_index_past_the_end() -> None:
    found = on_mesh(lambda tokens: shard_index(tokens, 10))(np.array([0, 9, 10, -1, 2**31 - 1], np.int32))
    assert found.tolist() == [0, 9, 10, 10, 10]
