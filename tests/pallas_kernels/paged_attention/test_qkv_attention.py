"""Attention of the raw product of the projections: the kernel that writes it against numpy, and the whole."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import (
    Backend,
    BackendName,
    PagedKV,
    paged_attention,
    qkv_attention,
    target_of,
)
from pallas_kernels.paged_attention.backends import backend_module
from pallas_kernels.paged_attention.triton.qkv import write_qkv
from pallas_kernels.paged_attention.write import token_slots
from tests.pallas_kernels.paged_attention import naive
from tests.pallas_kernels.paged_attention import test_paged_attention as suite
from tests.pallas_kernels.paged_attention.cases import Batch, Case, make_batch
from tests.selection import grid

EPS = 1e-5
MIXED = ((1, 1), (33, 1), (40, 24), (17, 17))
DECODE = ((1, 1), (33, 1), (48, 1))


@dataclasses.dataclass(frozen=True)
class Variant:
    """A batch, and what its model does to the product."""

    case: Case
    bias: bool = False
    norms: bool = False

    def __str__(self) -> str:
        return self.case.name


def _variant(
    name: str, rows: tuple[tuple[int, int], ...] = MIXED, *, bias: bool = False, norms: bool = False, **o: Any
):
    decodes = sum(new == 1 for _, new in rows)
    return Variant(Case(name, rows, decodes, decode_only=rows is DECODE, **o), bias, norms)


VARIANTS = [
    _variant("plain"),
    _variant("decode", DECODE, heads=8, kv_heads=2, dtype="bfloat16"),
    _variant("everything", bias=True, norms=True, dtype="bfloat16", kv_dtype="float8_e4m3fn", heads=9, kv_heads=3),
    _variant("bias", bias=True, heads=14, kv_heads=2, dtype="float16"),
    _variant("norms", norms=True, heads=2, kv_heads=2, head_dim=128, layer=0),
    _variant("dim-80-norms-page-32", norms=True, heads=3, kv_heads=3, head_dim=80, page_size=32),
    _variant("dim-96-bias-norms", bias=True, norms=True, heads=10, head_dim=96, dtype="bfloat16"),
    _variant("dim-256-16-to-1", DECODE, heads=16, kv_heads=1, head_dim=256),
    _variant("dim-16-no-padding", heads=6, head_dim=16, pad_rows=0, pad_tokens=0),
    _variant("nothing-live", (), pad_tokens=20),
]  # fmt: skip
QUICK = ("plain", "everything", "dim-80-norms-page-32")


def _rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    return x.astype(dtype).astype(np.float64)


def _expected(
    case: Case, qkv: np.ndarray, bias: np.ndarray | None, norms: Any, cos: np.ndarray, sin: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return queries, keys and values; the result of each part is rounded to the case's dtype."""
    dtype = jnp.dtype(case.dtype)
    x = qkv.astype(np.float64)
    if bias is not None:
        x = _rounded(x + bias.astype(np.float64), dtype)
    x = x.reshape(len(x), case.kv_heads, -1, case.head_dim)
    qk, v = x[:, :, :-1], x[:, :, -1]
    if norms is not None:
        weights = np.stack([norms[0]] * (qk.shape[2] - 1) + [norms[1]]).astype(np.float64)
        scaled = qk / np.sqrt((qk**2).mean(-1, keepdims=True) + EPS)
        qk = _rounded(_rounded(scaled, dtype) * weights, dtype)
    first, second = np.split(qk, 2, axis=-1)
    cos, sin = (x[:, None, None].astype(np.float64) for x in (cos, sin))
    qk = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(dtype)
    return qk[:, :, :-1].reshape(len(x), case.heads, case.head_dim), qk[:, :, -1], v.astype(dtype)


class Inputs(NamedTuple):
    """A variant's batch, the product, and what follows the product.

    Padding has numbers, as the pool has NaN wherever they might be written.
    """

    batch: Batch
    qkv: np.ndarray
    bias: np.ndarray | None
    norms: tuple[np.ndarray, np.ndarray] | None
    rotation: tuple[np.ndarray, np.ndarray]


def _inputs(variant: Variant) -> Inputs:
    case = variant.case
    batch = make_batch(case)
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32).astype(case.dtype)

    width = (case.heads + 2 * case.kv_heads) * case.head_dim
    qkv = normal(len(batch.q), width)
    bias = normal(width) if variant.bias else None
    norms = (normal(case.head_dim), normal(case.head_dim)) if variant.norms else None
    angle = rng.uniform(0, 9, (len(batch.q), case.head_dim // 2)).astype(np.float32)
    return Inputs(batch, qkv, bias, norms, (np.cos(angle), np.sin(angle)))


def _pool(case: Case, batch: Batch) -> PagedKV:
    scales = None if batch.scales is None else jnp.asarray(batch.scales)
    return PagedKV(jnp.asarray(batch.keys), jnp.asarray(batch.values), case.num_layers, scales)


@pytest.mark.parametrize("variant", grid(VARIANTS, lambda variant: str(variant) in QUICK), ids=str)
def test_queries_and_pool_equal_numpys(variant: Variant) -> None:
    case, (batch, qkv, bias, norms, rotation) = variant.case, _inputs(variant)
    run = jax.jit(functools.partial(write_qkv, eps=EPS, interpret=True))
    where = batch.page_table, batch.query_starts, batch.kv_lens, np.int32(batch.num_seqs)
    slots = token_slots(len(batch.q), case.page_size, *where)
    q, kv, zeros = run(qkv, bias, norms, rotation, _pool(case, batch), np.int32(case.layer), slots)
    np.testing.assert_array_equal(zeros, np.zeros((len(batch.q), case.kv_heads), np.int32))

    expected_q, k, v = _expected(case, qkv, bias, norms, *rotation)
    live = batch.query_starts[batch.num_seqs]
    _assert_close(np.asarray(q)[:live], expected_q[:live])
    pools = naive.pool_after(case, dataclasses.replace(batch, k=k, v=v))
    for found, pool, before in zip(kv.pools, pools, (batch.keys, batch.values)):
        _assert_close(np.asarray(found), pool)
        written = _written(case, batch, before.shape)
        np.testing.assert_array_equal(_bits(np.asarray(found)[:, ~written]), _bits(before[:, ~written]))


@pytest.mark.slow
@pytest.mark.parametrize("backend", grid(["triton", "mosaic_gpu"], lambda name: name == "triton"))
@pytest.mark.parametrize("variant", grid(VARIANTS[:3], lambda variant: str(variant) == "everything"), ids=str)
def test_the_output_equals_that_of_separate_queries_and_keys(variant: Variant, backend: BackendName) -> None:
    case, (batch, qkv, bias, norms, rotation) = variant.case, _inputs(variant)
    suite._skip_refused(case, backend)
    where = batch.page_table, batch.query_starts, batch.kv_lens, np.int32(batch.num_decodes), np.int32(batch.num_seqs)
    chosen = Backend(backend, target=target_of(jax.devices()[0]))
    options: dict[str, Any] = {"scale": 0.1, "decode_only": case.decode_only, "backend": chosen}
    jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    run = jit(functools.partial(qkv_attention, eps=EPS, **options))
    out, kv = run(qkv, bias, norms, rotation, _pool(case, batch), np.int32(case.layer), *where)

    heads = _expected(case, qkv, bias, norms, *rotation)
    separate = jit(functools.partial(paged_attention, **options))
    expected, expected_kv = separate(*heads, _pool(case, batch), np.int32(case.layer), *where)
    live = batch.query_starts[batch.num_seqs]
    np.testing.assert_allclose(*(np.asarray(x, np.float32)[:live] for x in (out, expected)), rtol=0.02, atol=0.02)
    for found, pool in zip(kv.pools, expected_kv.pools):
        _assert_close(np.asarray(found), np.asarray(pool))


def _written(case: Case, batch: Batch, shape: tuple[int, ...]) -> np.ndarray:
    """Return which tokens of the pool's entries are new."""
    written = np.zeros(shape[1:3], bool)
    for row, (length, new) in enumerate(case.rows):
        for position in range(length - new, length):
            page = batch.page_table[row, position // case.page_size]
            written[case.layer * (shape[1] // case.num_layers) + page, position % case.page_size] = True
    return written


def _assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    """Allow for one rounding to a neighbour, as float32 is not float64; two in float32."""
    assert found.dtype == expected.dtype
    tolerance = max(float(jnp.finfo(found.dtype).eps), 1e-6)
    wide, meant = found.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_allclose(wide, meant, rtol=tolerance, atol=1e-5)


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def test_it_is_there_for_gpus_only() -> None:
    for name in get_args(BackendName):
        assert hasattr(backend_module(name), "qkv_attention") == Backend(name).takes_qkv
