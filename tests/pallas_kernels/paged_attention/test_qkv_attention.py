"""Attention of the raw product of the projections: the kernel that writes it against numpy, and the whole."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import (
    BACKENDS,
    AttentionOptions,
    Backend,
    BackendName,
    PagedKV,
    Preparation,
    paged_attention,
    qkv_attention,
    takes_qkv,
    target_of,
)
from pallas_kernels.paged_attention.triton.qkv import write_qkv
from tests.pallas_kernels.paged_attention import naive
from tests.pallas_kernels.paged_attention import test_paged_attention as suite
from tests.pallas_kernels.paged_attention.cases import (
    Batch,
    Case,
    make_batch,
    rows_of,
)
from tests.selection import grid

EPS = 1e-5
MIXED = ((1, 1), (33, 1), (40, 24), (17, 17))
DECODE = ((1, 1), (33, 1), (48, 1))
FEW_QUERIES = ((33, 3), (1, 1), (40, 5))


@dataclasses.dataclass(frozen=True)
class Variant:
    """A batch, and what its model does to the product. `norms` is the dtype of the norms' weights."""

    case: Case
    bias: bool = False
    norms: str | None = None
    rotates: bool = True
    scales_queries: bool = False
    norms_values: bool = False
    keys_as_values: bool = False

    def __str__(self) -> str:
        return self.case.name


def _variant(
    name: str,
    rows: tuple[tuple[int, int], ...] = MIXED,
    *,
    bias: bool = False,
    norms: bool | str = False,
    rotates: bool = True,
    scales_queries: bool = False,
    norms_values: bool = False,
    keys_as_values: bool = False,
    **o: Any,
) -> Variant:
    decodes = 0 if "max_queries" in o else sum(new == 1 for _, new in rows)
    case = Case(name, rows, decodes, decode_only=rows is DECODE, **o)
    weights = norms if isinstance(norms, str) else case.dtype if norms else None
    return Variant(case, bias, weights, rotates, scales_queries, norms_values, keys_as_values)


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
    _variant("unrotated", rotates=False, dtype="bfloat16"),
    _variant("float32-norms", norms="float32", dtype="bfloat16", heads=8, kv_heads=1, head_dim=256),
    _variant("scaled-queries", scales_queries=True, dtype="bfloat16"),
    _variant("normed-values", norms="float32", norms_values=True, dtype="bfloat16"),
    _variant("dim-512-keys-as-values", norms="float32", norms_values=True, keys_as_values=True, heads=8, kv_heads=1,
             head_dim=512, dtype="bfloat16", kv_dtype="float8_e4m3fn"),
    _variant("keys-as-values-bias", bias=True, keys_as_values=True, heads=3, kv_heads=3, head_dim=80),
    _variant("few-queries", FEW_QUERIES, max_queries=5, norms=True, dtype="bfloat16", heads=8),
    _variant("unrotated-scaled-norms", DECODE, norms="float32", rotates=False, scales_queries=True, dtype="bfloat16"),
]  # fmt: skip
QUICK = ("plain", "normed-values", "everything", "dim-80-norms-page-32", "unrotated", "float32-norms", "scaled-queries")

WHOLE_NAMES = ("plain", "decode", "everything", "unrotated-scaled-norms", "keys-as-values-bias", "few-queries")
WHOLE = [variant for variant in VARIANTS if str(variant) in WHOLE_NAMES]


def _rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    return x.astype(dtype).astype(np.float64)


def _expected(variant: Variant, new: Product) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return queries, keys and values; the result of each part is rounded to the case's dtype."""
    case = variant.case
    then: Any = new.preparation
    dtype, norms = jnp.dtype(case.dtype), then.norms
    x = new.qkv.astype(np.float64)
    if then.bias is not None:
        x = _rounded(x + then.bias.astype(np.float64), dtype)
    x = x.reshape(len(x), case.kv_heads, -1, case.head_dim)
    qk, v = x if variant.keys_as_values else x[:, :, :-1], x[:, :, -1]
    if variant.norms_values:
        v = v / np.sqrt((v**2).mean(-1, keepdims=True) + EPS)
    if norms is not None:
        weights = np.stack([norms[0]] * (qk.shape[2] - 1) + [norms[1]]).astype(np.float64)
        scaled = qk / np.sqrt((qk**2).mean(-1, keepdims=True) + EPS)
        scaled = _rounded(scaled, dtype) if norms[0].dtype == dtype else scaled
        qk = _rounded(scaled * weights, dtype)
    if then.rotation is not None:
        first, second = np.split(qk, 2, axis=-1)
        cos, sin = (x[:, None, None].astype(np.float64) for x in then.rotation)
        qk = _rounded(np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1), dtype)
    q = qk[:, :, :-1].reshape(len(x), case.heads, case.head_dim)
    if then.query_scale is not None:
        q = q * then.query_scale[:, None, None]
    return q.astype(dtype), qk[:, :, -1].astype(dtype), v.astype(dtype)


class Product(NamedTuple):
    """The product of the projections and what becomes of it.

    Padding has numbers, as the pool has NaN wherever they might be written.
    """

    qkv: np.ndarray
    preparation: Preparation


def _inputs(variant: Variant) -> tuple[Batch, Product]:
    case = variant.case
    batch = make_batch(case)
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32).astype(case.dtype)

    width = (case.heads + (1 if variant.keys_as_values else 2) * case.kv_heads) * case.head_dim
    qkv = normal(len(batch.q), width)
    bias = normal(width) if variant.bias else None
    norms = None
    if variant.norms is not None:
        query, key = (rng.standard_normal(case.head_dim, dtype=np.float32).astype(variant.norms) for _ in range(2))
        norms = query, key
    angle = rng.uniform(0, 9, (len(batch.q), case.head_dim // 2)).astype(np.float32)
    rotation = (np.cos(angle), np.sin(angle)) if variant.rotates else None
    factors = rng.uniform(0.5, 2, len(batch.q)).astype(np.float32) if variant.scales_queries else None
    forms = variant.norms_values, variant.keys_as_values
    preparation: Any = Preparation(EPS, bias, norms, rotation, factors, *forms)
    return batch, Product(qkv, preparation)


def _pool(case: Case, batch: Batch) -> PagedKV:
    scales = None if batch.scales is None else jnp.asarray(batch.scales)
    return PagedKV(jnp.asarray(batch.keys), jnp.asarray(batch.values), case.num_layers, scales)


@pytest.mark.interpreted
@pytest.mark.parametrize("variant", grid(VARIANTS, lambda variant: str(variant) in QUICK), ids=str)
def test_queries_and_pool_equal_numpys(variant: Variant) -> None:
    case, (batch, new) = variant.case, _inputs(variant)
    run = jax.jit(functools.partial(write_qkv, interpret=True))
    slots = rows_of(case, batch).slots(len(batch.q), case.page_size)
    q, kv, zeros = run(*new, _pool(case, batch), np.int32(case.layer), slots)
    np.testing.assert_array_equal(zeros, np.zeros((len(batch.q), case.kv_heads), np.int32))

    expected_q, k, v = _expected(variant, new)
    live = batch.query_starts[batch.num_seqs]
    _assert_close(np.asarray(q)[:live], expected_q[:live])
    pools = naive.pool_after(case, dataclasses.replace(batch, k=k, v=v))
    for found, pool, before in zip(kv.pools, pools, (batch.keys, batch.values)):
        _assert_close(np.asarray(found), pool)
        written = _written(case, batch, before.shape)
        np.testing.assert_array_equal(_bits(np.asarray(found)[:, ~written]), _bits(before[:, ~written]))


@pytest.mark.interpreted
@pytest.mark.parametrize("backend", grid(["triton", "mosaic_gpu"], lambda name: name == "triton"))
@pytest.mark.parametrize("variant", grid(WHOLE, lambda variant: str(variant) in ("everything", "few-queries")), ids=str)
def test_the_output_equals_that_of_separate_queries_and_keys(variant: Variant, backend: BackendName) -> None:
    case, (batch, new) = variant.case, _inputs(variant)
    suite._skip_refused(case, backend)
    chosen = Backend(backend, target_of(jax.devices()[0]))
    where = _pool(case, batch), np.int32(case.layer), rows_of(case, batch), AttentionOptions(0.1)
    jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    out, kv = jit(functools.partial(qkv_attention, backend=chosen))(*new, *where)

    heads = _expected(variant, new)
    expected, expected_kv = jit(functools.partial(paged_attention, backend=chosen))(*heads, *where)
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
    """Allow for one rounding to a neighbour, as float32 is not float64, of a few numbers; two in float32."""
    assert found.dtype == expected.dtype
    tolerance = max(float(jnp.finfo(found.dtype).eps), 1e-6)
    wide, meant = found.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_allclose(wide, meant, rtol=tolerance, atol=1e-5)
    if found.dtype.itemsize < 4 and np.any(numbers := ~np.isnan(meant)):
        assert np.mean(wide[numbers] == meant[numbers]) > 0.98


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def test_it_is_there_for_gpus_only() -> None:
    for name in BACKENDS.names:
        assert hasattr(BACKENDS.module(name), "qkv_attention") == takes_qkv(Backend(name))
