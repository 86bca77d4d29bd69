"""Latent attention in both of its forms, against keys and values of each head in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxserve.layers.attention import AttentionSettings
from jaxserve.layers.batch import KVLayer, TokenBatch
from jaxserve.layers.latent_attention import LatentAttentionParams, expands, latent_attention
from jaxserve.layers.rope import Rotation
from pallas_kernels.paged_attention import Backend, PagedKV, kv_layout
from tests.models.forward import cpu_mesh

# Values are wider than keys
TOKENS, DIM, HEADS, LOW_RANK, RANK, PLAIN, ROTATED, WIDTH = 32, 24, 3, 20, 60, 8, 6, 16
PAGE, PAGES, EPS, SCALE = 4, 20, 1e-5, 0.2
# Rows as (tokens of earlier steps, new tokens): a decode, a chunk that continues a prompt, and two that begin one
ROWS = ((5, 1), (6, 7), (0, 9), (0, 11))
STARTS = np.cumsum([0, *(new for _, new in ROWS)])
LAYER = KVLayer(jnp.int32(1), 0)


def _normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def _params(*, low_rank: bool = True) -> LatentAttentionParams:
    first, inputs = (LOW_RANK, LOW_RANK) if low_rank else (0, DIM)
    return LatentAttentionParams(
        down=_normal(0, first + RANK + ROTATED, DIM) / 5,
        query_norm=1 + _normal(1, LOW_RANK) / 5 if low_rank else None,
        latent_norm=1 + _normal(2, RANK) / 5,
        query=_normal(3, HEADS, PLAIN + ROTATED, inputs) / 5,
        key_up=_normal(4, HEADS, RANK, PLAIN) / 6,
        value_up=_normal(5, HEADS, WIDTH, RANK) / 6,
        output=_normal(6, DIM, HEADS, WIDTH) / 5,
    )


def _rotation() -> Rotation:
    angle = _normal(7, TOKENS, 1, 1, ROTATED // 2)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([cos, cos], axis=2), jnp.concatenate([-sin, sin], axis=2)


def _batch(*, starts_last: bool) -> TokenBatch:
    pages = np.random.default_rng(0).permutation(PAGES).reshape(len(ROWS), -1)
    padding = np.zeros((1, pages.shape[1]))
    return TokenBatch(
        tokens=jnp.zeros(TOKENS, jnp.int32),
        positions=jnp.zeros(TOKENS, jnp.int32),
        fill_lens=jnp.zeros(TOKENS, jnp.int32),
        page_tables=(jnp.asarray(np.concatenate([pages, padding]), jnp.int32),),
        query_starts=jnp.asarray([*STARTS, STARTS[-1]], jnp.int32),
        kv_lens=jnp.asarray([*(old + new for old, new in ROWS), 0], jnp.int32),
        num_decodes=jnp.int32(1),
        num_seqs=jnp.int32(len(ROWS)),
        starts_last=starts_last,
    )


def _pool(dtype: type = jnp.float32, scale: float | None = None) -> PagedKV:
    sizes = {"num_layers": 2, "num_pages": PAGES, "page_size": PAGE, "num_kv_heads": 1, "head_dim": RANK + ROTATED}
    layout = kv_layout(**sizes, dtype=np.dtype(dtype), value_dim=RANK)
    scales = None if scale is None else jnp.full((2, 2, 1), scale)
    return layout.paged_kv(_normal(8, *layout.shape).astype(dtype), jnp.zeros(layout.values_shape, dtype), scales)


def _attend(params: LatentAttentionParams, kv: PagedKV, *, starts_last: bool) -> tuple[np.ndarray, PagedKV]:
    settings = AttentionSettings(EPS, Backend("reference"), scale=SCALE)

    def body(x: jax.Array, params: LatentAttentionParams, kv: PagedKV, batch: TokenBatch) -> tuple[jax.Array, PagedKV]:
        out, (pool,) = latent_attention(x, params, batch, (kv,), LAYER, _rotation(), settings)
        return out[: STARTS[-1]], pool

    whole = PartitionSpec()
    run = jax.shard_map(body, mesh=cpu_mesh(), in_specs=whole, out_specs=whole, check_vma=False)
    out, pool = jax.jit(run)(_normal(9, TOKENS, DIM), params, kv, _batch(starts_last=starts_last))
    return np.asarray(out), pool


def _rows(pool: PagedKV, row: int) -> np.ndarray:
    """Return the rows of a sequence as they lie in the pool, `[length, row]`."""
    pages = np.asarray(_batch(starts_last=False).page_tables[0])[row] + PAGES
    stored = np.asarray(pool.gather(0, jnp.asarray(pages), RANK + ROTATED))[0].astype(np.float64)
    scale = 1.0 if pool.scales is None else float(pool.scales[0, 1, 0])
    return stored.reshape(-1, RANK + ROTATED)[: sum(ROWS[row])] * scale


def _expected(params: LatentAttentionParams, pool: PagedKV) -> np.ndarray:
    """Return the output by keys and values of each head, made of the rows that the pool has after the step."""
    p = jax.tree.map(lambda array: np.asarray(array, np.float64), params)
    x = np.asarray(_normal(9, TOKENS, DIM), np.float64)
    low_rank = x
    if p.query_norm is not None:
        low_rank = (x @ p.down.T)[:, :LOW_RANK]
        low_rank = low_rank / np.sqrt((low_rank**2).mean(-1, keepdims=True) + EPS) * p.query_norm
    queries = np.einsum("ti,hqi->thq", low_rank, p.query)
    cos, sin = (np.asarray(part, np.float64)[:, 0] for part in _rotation())
    half = queries[..., PLAIN:].reshape(TOKENS, HEADS, 2, -1)
    queries[..., PLAIN:] = (half * cos[:, None] + half[:, :, ::-1] * sin[:, None]).reshape(TOKENS, HEADS, -1)
    out = []
    for row, (old, new) in enumerate(ROWS):
        latent, rotated = np.split(_rows(pool, row), [RANK], axis=1)
        keys = np.einsum("tr,hrn->thn", latent, p.key_up)
        keys = np.concatenate([keys, np.repeat(rotated[:, None], HEADS, axis=1)], axis=2)
        values = np.einsum("tr,hvr->thv", latent, p.value_up)
        logits = np.einsum("qhd,thd->hqt", queries[STARTS[row] : STARTS[row + 1]], keys) * SCALE
        seen = np.arange(old + new) <= np.arange(old, old + new)[:, None]
        weights = np.where(seen, np.exp(logits), 0)
        out.append(np.einsum("hqt,thv->qhv", weights / weights.sum(-1, keepdims=True), values))
    return np.einsum("thv,dhv->td", np.concatenate(out), p.output)


@pytest.mark.parametrize("low_rank", [True, False])
@pytest.mark.parametrize("starts_last", [False, True], ids=["absorbed", "expanded"])
def test_both_forms_equal_attention_by_keys_and_values(starts_last: bool, low_rank: bool) -> None:
    params = _params(low_rank=low_rank)
    out, pool = _attend(params, _pool(), starts_last=starts_last)
    np.testing.assert_allclose(out, _expected(params, pool), rtol=1e-4, atol=1e-4)


def test_a_row_is_the_normalized_latent_vector_and_the_rotated_part() -> None:
    params = _params()
    _, pool = _attend(params, _pool(), starts_last=True)
    down = np.asarray(_normal(9, TOKENS, DIM) @ params.down.T)[:, LOW_RANK:]
    latent = (
        down[:, :RANK] / np.sqrt((down[:, :RANK] ** 2).mean(-1, keepdims=True) + EPS) * np.asarray(params.latent_norm)
    )
    for row, (old, new) in enumerate(ROWS):
        stored = _rows(pool, row)[old:]
        np.testing.assert_allclose(stored[:, :RANK], latent[STARTS[row] :][:new], rtol=1e-4, atol=1e-4)
        norms = [np.linalg.norm(x, axis=1) for x in (stored[:, RANK:], down[STARTS[row] :][:new, RANK:])]
        np.testing.assert_allclose(*norms, rtol=1e-4)


def test_prompts_are_expanded_from_the_rows_that_the_pool_has() -> None:
    """A pool of fp8 rounds rows; a token of a prompt sees the same numbers as the decodes after it."""
    params = _params()
    out, pool = _attend(params, _pool(jnp.float8_e4m3fn, 0.02), starts_last=True)
    np.testing.assert_allclose(out, _expected(params, pool), rtol=1e-4, atol=1e-4)


def test_prompts_are_expanded_where_that_takes_fewer_products() -> None:
    deepseek = 512, 128 + 128
    assert [expands(Backend("triton"), tokens, *deepseek) for tokens in (341, 342)] == [False, True]
    assert not any(expands(Backend(name), 4096, *deepseek) for name in ("cpu", "mosaic_tpu"))
