"""Latent attention of raw products: the kernel that writes them against numpy, and the whole."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import AttentionOptions, Backend, PagedKV, paged_attention, target_of
from pallas_kernels.paged_attention.arguments import LatentPreparation
from pallas_kernels.paged_attention.triton.backend import latent_attention
from pallas_kernels.paged_attention.triton.latent_write import write_latent
from tests.pallas_kernels.paged_attention import naive
from tests.pallas_kernels.paged_attention import test_paged_attention as suite
from tests.pallas_kernels.paged_attention import test_qkv_attention as of_heads
from tests.pallas_kernels.paged_attention.cases import DEEPSEEK, FP8_BF16, LATENT, Batch, Case, make_batch, rows_of
from tests.selection import grid

EPS = 1e-5
# The numbers of a query's first part, and of the product before a row.
UNROTATED, BEFORE = 24, 40


@dataclasses.dataclass(frozen=True)
class Variant:
    """A batch, and the dtype of its norm's weight."""

    case: Case
    norm: str

    def __str__(self) -> str:
        return self.case.name


MIXED, DECODE = ((1, 1), (33, 1), (40, 24), (17, 17)), ((1, 1), (33, 1), (48, 1))
VARIANTS = [
    Variant(Case("plain", MIXED, 2, **LATENT), "float32"),
    Variant(Case("fp8", MIXED, 2, **{**LATENT, **FP8_BF16, "heads": 20}), "bfloat16"),
    Variant(Case("float32-norm", MIXED, 2, **{**LATENT, "dtype": "bfloat16", "head_dim": 40}), "float32"),
    Variant(Case("few-queries", ((33, 3), (1, 1), (40, 5)), 0, max_queries=5, **LATENT), "float32"),
    Variant(Case("nothing-live", (), 0, pad_tokens=20, **LATENT), "float32"),
    Variant(Case("deepseek-v3", DECODE, 3, decode_only=True, **DEEPSEEK, heads=64), "bfloat16"),
]


class Products(NamedTuple):
    """The products of the projections, and what becomes of them."""

    q_latent: np.ndarray
    q: np.ndarray
    down: np.ndarray
    preparation: LatentPreparation


def _inputs(variant: Variant) -> tuple[Batch, Products]:
    case = variant.case
    batch, value_dim = make_batch(case), case.value_dim
    assert value_dim is not None
    rng, tokens, rest = np.random.default_rng(1), len(batch.q), case.head_dim - value_dim

    def normal(*shape: int, dtype: str = case.dtype) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32).astype(dtype)

    angle = rng.uniform(0, 9, (tokens, rest // 2)).astype(np.float32)
    preparation = LatentPreparation(EPS, normal(value_dim, dtype=variant.norm), (np.cos(angle), np.sin(angle)))
    q_latent, q = normal(tokens, case.heads, value_dim), normal(tokens, case.heads, UNROTATED + rest)
    return batch, Products(q_latent, q, normal(tokens, BEFORE + case.head_dim), preparation)


def _expected(variant: Variant, new: Products) -> tuple[np.ndarray, np.ndarray]:
    """Return whole queries and rows; the result of each part is rounded to the case's dtype."""
    dtype, value_dim, then = jnp.dtype(variant.case.dtype), new.q_latent.shape[2], new.preparation

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(dtype).astype(np.float64)

    def rotated(x: np.ndarray) -> np.ndarray:
        first, second = np.split(x.astype(np.float64), 2, axis=-1)
        cos, sin = (np.asarray(x, np.float64)[:, None] for x in then.rotation)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    row = new.down[:, None, BEFORE:].astype(np.float64)
    value = row[..., :value_dim]
    value = value / np.sqrt((value**2).mean(-1, keepdims=True) + EPS)
    value = rounded(value) if then.norm.dtype == dtype else value
    k = np.concatenate([value * np.asarray(then.norm, np.float64), rotated(row[..., value_dim:])], axis=-1)
    q = np.concatenate([new.q_latent.astype(np.float64), rotated(new.q[..., UNROTATED:])], axis=-1)
    return q.astype(dtype), k.astype(dtype)


def _pool(case: Case, batch: Batch) -> PagedKV:
    return suite._pool(case, batch, "")


@pytest.mark.interpreted
@pytest.mark.parametrize("variant", grid(VARIANTS, lambda variant: str(variant) == "fp8"), ids=str)
def test_queries_and_pool_equal_numpys(variant: Variant) -> None:
    case, (batch, new) = variant.case, _inputs(variant)
    run = jax.jit(functools.partial(write_latent, items=3, interpret=True))
    slots = rows_of(case, batch).slots(len(batch.q), case.page_size)
    q, kv, zeros = run(new.down, new.q, new.preparation, _pool(case, batch), np.int32(case.layer), slots)
    np.testing.assert_array_equal(zeros, np.zeros((len(batch.q), 3), np.int32))

    expected_q, k = _expected(variant, new)
    live = batch.query_starts[batch.num_seqs]
    of_heads._assert_close(np.asarray(q)[:live], expected_q[:live, :, case.value_dim :])
    pool, _ = naive.pool_after(case, dataclasses.replace(batch, k=k))
    found = np.asarray(kv.keys)
    of_heads._assert_close(found, pool)
    written = of_heads._written(case, batch, found.shape)
    np.testing.assert_array_equal(of_heads._bits(found[:, ~written]), of_heads._bits(batch.keys[:, ~written]))


@pytest.mark.interpreted
@pytest.mark.parametrize("variant", grid(VARIANTS[:4], lambda variant: str(variant) == "fp8"), ids=str)
def test_the_output_equals_that_of_separate_queries_and_rows(variant: Variant) -> None:
    case, (batch, new) = variant.case, _inputs(variant)
    chosen = Backend("triton", target_of(jax.devices()[0]))
    where: tuple[Any, ...] = _pool(case, batch), np.int32(case.layer), rows_of(case, batch), AttentionOptions(0.1)
    jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    out, kv = jit(functools.partial(latent_attention, backend=chosen))(*new, *where)

    q, k = _expected(variant, new)
    expected, expected_kv = jit(functools.partial(paged_attention, backend=chosen))(q, k, None, *where)
    live = batch.query_starts[batch.num_seqs]
    np.testing.assert_allclose(*(np.asarray(x, np.float32)[:live] for x in (out, expected)), rtol=0.02, atol=0.02)
    of_heads._assert_close(np.asarray(kv.keys), np.asarray(expected_kv.keys))
