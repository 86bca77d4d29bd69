"""Attention layers that share keys and values, use keys as values, or normalize values."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxserve.layers.attention import AttentionParams, AttentionSettings, self_attention
from jaxserve.layers.batch import KVLayer, TokenBatch
from jaxserve.layers.rope import Rotation
from pallas_kernels.paged_attention import Backend, BackendName, PagedKV, kv_layout
from tests.models.forward import cpu_mesh

TOKENS, DIM, KV_HEADS, GROUP, HEAD_DIM, PAGES = 24, 48, 2, 3, 16, 4
EPS = 1e-6
# Triton's kernels are interpreted here, which takes seconds.
BACKENDS = ["reference", "cpu", pytest.param("triton", marks=pytest.mark.interpreted)]


def _normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def _params(rows: int, *, k_norm: bool = True) -> AttentionParams:
    """Return parameters; those of more rows begin with those of fewer."""
    return AttentionParams(
        qkv=_normal(0, GROUP + 2, KV_HEADS, HEAD_DIM, DIM)[:rows].swapaxes(0, 1) * DIM**-0.5,
        output=_normal(1, DIM, KV_HEADS, GROUP, HEAD_DIM),
        qkv_bias=_normal(2, GROUP + 2, KV_HEADS, HEAD_DIM)[:rows].swapaxes(0, 1),
        output_bias=None,
        q_norm=_normal(3, HEAD_DIM),
        k_norm=_normal(4, HEAD_DIM) if k_norm else None,
    )


def _rotation() -> Rotation:
    angle = _normal(5, TOKENS, 1, 1, HEAD_DIM // 2)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([cos, cos], axis=2), jnp.concatenate([-sin, sin], axis=2)


def _attend(params: AttentionParams, kv: PagedKV, layer: KVLayer, **settings: Any) -> tuple[jax.Array, PagedKV]:
    """Run the layer on a decode, a prefill chunk and padding."""
    batch = TokenBatch(
        tokens=jnp.zeros(TOKENS, jnp.int32),
        positions=jnp.zeros(TOKENS, jnp.int32),
        fill_lens=jnp.zeros(TOKENS, jnp.int32),
        page_tables=(jnp.asarray([[2, 0], [1, 3]], jnp.int32),),
        query_starts=jnp.asarray([0, 1, 20], jnp.int32),
        kv_lens=jnp.asarray([1, 19], jnp.int32),
        num_decodes=jnp.int32(1),
        num_seqs=jnp.int32(2),
    )

    def body(x: jax.Array, params: AttentionParams, kv: PagedKV, layer: KVLayer) -> tuple[jax.Array, Any]:
        options = AttentionSettings(norm_eps=EPS, **settings)
        out, (pool,) = self_attention(x, params, batch, (kv,), layer, _rotation(), options)
        return out[:20], pool

    whole = PartitionSpec()
    run = jax.shard_map(body, mesh=cpu_mesh(), in_specs=whole, out_specs=whole, check_vma=False)
    return jax.jit(run)(_normal(6, TOKENS, DIM), params, kv, layer)


def _pool() -> PagedKV:
    sizes = {"num_layers": 2, "num_pages": PAGES, "page_size": 16, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    layout = kv_layout(**sizes, dtype=np.dtype(np.float32))
    return layout.paged_kv(jnp.zeros(layout.shape), jnp.zeros(layout.shape))


LAYER = KVLayer(jnp.int32(1), 0)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_layer_reuses_the_keys_and_values_of_an_earlier_one(name: BackendName) -> None:
    backend = Backend(name)
    expected, kv = _attend(_params(GROUP + 2), _pool(), LAYER, backend=backend)
    reusing = dataclasses.replace(LAYER, reuses=True)
    out, after = _attend(_params(GROUP, k_norm=False), kv, reusing, backend=backend)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    for pool, before in zip(after.pools, kv.pools, strict=True):
        np.testing.assert_array_equal(pool, before)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("keys_as_values", [False, True])
@pytest.mark.parametrize("norm_values", [False, True])
def test_values_are_normalized_or_keys(name: BackendName, keys_as_values: bool, norm_values: bool) -> None:
    settings = {"norm_values": norm_values, "keys_as_values": keys_as_values}
    params = _params(GROUP + (1 if keys_as_values else 2))
    _, kv = _attend(params, _pool(), LAYER, backend=Backend(name), **settings)
    weight, bias = (x[:, -1] for x in (params.qkv, params.qkv_bias))
    values = np.einsum("td,hkd->htk", *(np.asarray(x, np.float64) for x in (_normal(6, TOKENS, DIM), weight)))
    values += np.asarray(bias)[:, None]
    if norm_values:
        values /= np.sqrt((values**2).mean(-1, keepdims=True) + EPS)
    stored = np.asarray(kv.values).reshape(KV_HEADS, 2, PAGES, 16, HEAD_DIM)[:, 1]
    np.testing.assert_allclose(stored[:, 2, 0], values[:, 0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(stored[:, 1], values[:, 1:17], rtol=1e-4, atol=1e-4)


def test_keys_as_values_are_neither_normalized_nor_rotated_twice() -> None:
    """The keys are the same as with a value of its own, and the output is that of a value projection equal to keys'."""
    keys = _params(GROUP + 1)
    both = dataclasses.replace(
        keys,
        qkv=jnp.concatenate([keys.qkv, keys.qkv[:, -1:]], axis=1),
        qkv_bias=jnp.concatenate([keys.qkv_bias, keys.qkv_bias[:, -1:]], axis=1),
    )
    backend = Backend("reference")
    out, kv = _attend(keys, _pool(), LAYER, backend=backend, keys_as_values=True)
    expected, expected_kv = _attend(both, _pool(), LAYER, backend=backend)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    for pool, other in zip(kv.pools, expected_kv.pools, strict=True):
        np.testing.assert_allclose(pool, other, rtol=1e-5, atol=1e-5)
