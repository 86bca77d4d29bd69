"""Every backend against dense attention, over the table of cases and over random batches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import (
    BACKENDS,
    Backend,
    BackendName,
    PagedKV,
    Problem,
    kv_layout,
    kv_platform,
    paged_attention,
    target_of,
)
from pallas_kernels.paged_attention.layout import as_pool_rows
from tests.pallas_kernels.paged_attention import naive
from tests.pallas_kernels.paged_attention.cases import (
    CASES,
    CORNERS,
    CORNERS_OF_INTERPRETED,
    Batch,
    Case,
    make_batch,
    options_of,
    rows_of,
)
from tests.selection import examples, grid, is_interpreted

# Numpy warns in Mosaic GPU's interpreter about rows of a tile that are never used.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")


@functools.cache
def _compiled(backend: BackendName) -> Any:
    chosen = Backend(backend, target_of(jax.devices()[0]))
    # Compiling takes most of the time of these tests, and half of that is optimizing.
    fast = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    return jax.jit(functools.partial(paged_attention, backend=chosen), compiler_options=fast)


def _pool(case: Case, batch: Batch, platform: str) -> PagedKV:
    """Return the batch's pool in the layout of a platform."""
    kv_heads, entries, page_size, head_dim = batch.keys.shape
    layout = kv_layout(
        num_layers=case.num_layers,
        num_pages=entries // case.num_layers,
        page_size=page_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=batch.keys.dtype,
        platform=platform,
        value_dim=case.value_dim,
    )
    arrays = (jnp.zeros(shape, layout.dtype) for shape in (layout.shape, layout.values_shape))
    scales = None if batch.scales is None else jnp.asarray(batch.scales)
    kv = layout.paged_kv(*arrays, scales)
    values = None if case.value_dim is not None else jnp.asarray(batch.values)
    pools = as_pool_rows(jnp.asarray(batch.keys), values, kv)
    return kv.with_pools([pool.swapaxes(0, 1) for pool in pools] if kv.page_major else pools)


def _run(
    case: Case, batch: Batch, backend: BackendName, platform: str = ""
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    out, kv = _compiled(backend)(
        batch.q,
        batch.k,
        batch.v,
        _pool(case, batch, platform or kv_platform(Backend(backend))),
        np.int32(case.layer),
        rows_of(case, batch),
        options_of(case, batch),
    )
    entries = np.arange(kv.num_entries)
    keys, values = (np.asarray(kv.gather(which, entries, case.head_dim)) for which in (0, 1))
    return np.asarray(out), keys, values


def _skip_refused(case: Case, backend: BackendName) -> None:
    """Skip what a backend refuses; `test_mosaic_gpu.py` has cases in bfloat16 that are in float32 here."""
    dtype, kv_dtype = jnp.dtype(case.dtype), jnp.dtype(case.kv_dtype or case.dtype)
    problem = Problem(case.heads, case.kv_heads, case.head_dim, case.page_size, dtype, kv_dtype, case.value_dim)
    if refusal := BACKENDS.refusal(backend, target_of(jax.devices()[0]), (problem,)):
        pytest.skip(refusal)


def _bits(array: np.ndarray) -> np.ndarray:
    """Return the bits as integers: then NaN equals NaN, and -0 is not 0."""
    bits = np.ascontiguousarray(array).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])
    # XLA's CPU keeps the sign of a NaN of e5m2, not which of several NaN it is.
    return np.where(np.isnan(array), bits | 3, bits) if array.dtype == jnp.float8_e5m2 else bits


def _check(case: Case, batch: Batch, backend: BackendName, platform: str = "") -> None:
    out, keys, values = _run(case, batch, backend, platform)
    expected = naive.attention(case, batch)
    assert out.dtype == batch.q.dtype
    tolerance = 1e-2 if case.dtype == "bfloat16" else 1e-5
    first = int(batch.query_starts[case.num_decodes]) if case.chunks_only else 0
    found, expected = out[first : len(expected)].astype(np.float64), expected[first:]
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=tolerance)
    expected_keys, expected_values = naive.pool_after(case, batch)
    np.testing.assert_array_equal(_bits(keys), _bits(expected_keys))
    np.testing.assert_array_equal(_bits(values), _bits(expected_values))


def _case_marks(case: Case, backend: BackendName) -> list[pytest.MarkDecorator]:
    """More of the corners run on the backend that runs here; an interpreter takes seconds for each."""
    # `test_mosaic_gpu.py` has corners of its own.
    own = [pytest.mark.interpreted] if is_interpreted(backend) else []
    if backend == "mosaic_gpu" or case.name not in (CORNERS if backend == "cpu" else CORNERS_OF_INTERPRETED):
        return [pytest.mark.grid, *own]
    return own


PAIRS = [
    pytest.param(case, backend, marks=_case_marks(case, backend))
    for case, backend in itertools.product(CASES, BACKENDS.names)
]


@pytest.mark.parametrize(("case", "backend"), PAIRS, ids=str)
def test_equals_dense_attention(case: Case, backend: BackendName) -> None:
    _skip_refused(case, backend)
    _check(case, make_batch(case), backend)


@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_the_reference_reads_and_writes_a_tpus_pool(head_dim: int) -> None:
    case = Case("tpu-pool", ((40, 1), (17, 1), (30, 12)), 2, head_dim=head_dim)
    _check(case, make_batch(case), "reference", "tpu")


_ROWS, _TOKENS, _LONGEST, _PAGE = 6, 96, 200, 16


@st.composite
def _ragged(draw: st.DrawFn) -> Case:
    """Draw a batch that fits one program of `_ROWS` rows and `_TOKENS` tokens."""
    num_decodes = draw(st.integers(0, _ROWS))
    rows = [(draw(st.integers(1, _LONGEST)), 1) for _ in range(num_decodes)]
    left = _TOKENS - num_decodes
    max_queries = draw(st.sampled_from([None, 5]))
    for _ in range(draw(st.integers(0, _ROWS - num_decodes))):
        if left > 0:
            new = draw(st.integers(1, min(left, max_queries or left)))
            rows.append((new + draw(st.integers(0, _LONGEST - new)), new))
            left -= new
    forms: list[dict[str, Any]] = [{}, {"window": 20}, {"window": 20, "soft_cap": 5.0, "sinks": True}]
    return Case(
        "drawn",
        tuple(rows),
        num_decodes,
        head_dim=16,
        page_size=_PAGE,
        pad_rows=_ROWS - len(rows),
        pad_tokens=left,
        decode_only=len(rows) == num_decodes and draw(st.booleans()),
        max_queries=max_queries,
        seed=draw(st.integers(0, 2**16)),
        **draw(st.sampled_from(forms)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", grid(BACKENDS.names, "cpu".__eq__, is_interpreted))
def test_drawn_batches_equal_dense_attention(backend: BackendName) -> None:
    interpreted = Backend(backend, target_of(jax.devices()[0])).interpret

    @settings(max_examples=12 if interpreted else examples(40), deadline=None, derandomize=True)
    @given(case=_ragged())
    def check(case: Case) -> None:
        _skip_refused(case, backend)
        pages = -(-_LONGEST // _PAGE)
        _check(case, make_batch(case, max_pages=pages, num_pages=_ROWS * pages), backend)

    check()


@pytest.mark.parametrize("backend", grid(BACKENDS.names, lambda name: name in ("cpu", "triton"), is_interpreted))
def test_a_row_does_not_depend_on_other_rows(backend: BackendName) -> None:
    """Compare bits: a row is summed over its own pages in their own order, however long other rows are."""
    case = Case("company", ((40, 1), (180, 1), (100, 30)), 2, head_dim=16, pad_rows=_ROWS - 3, pad_tokens=_TOKENS - 32)
    _skip_refused(case, backend)
    batch = make_batch(case, max_pages=13, num_pages=_ROWS * 13)
    together = _run(case, batch, backend)[0]
    alone = dataclasses.replace(case, rows=case.rows[:1], num_decodes=1, pad_rows=_ROWS - 1, pad_tokens=_TOKENS - 1)
    lonely = dataclasses.replace(
        batch,
        query_starts=np.minimum(batch.query_starts, 1),
        kv_lens=np.where(np.arange(_ROWS) < 1, batch.kv_lens, 0).astype(np.int32),
        num_decodes=1,
        num_seqs=1,
    )
    np.testing.assert_array_equal(_bits(_run(alone, lonely, backend)[0][0]), _bits(together[0]))


@pytest.mark.interpreted
@pytest.mark.parametrize("window", [None, 140])
def test_a_query_does_not_depend_on_queries_packed_with_it(window: int | None) -> None:
    """Compare bits where the queries of a row see different numbers of splits."""
    case = Case("packed", ((642, 5),), 0, pad_rows=4, pad_tokens=0, max_queries=5, window=window, reuses=True)
    batch = make_batch(case)
    together, *_ = _run(case, batch, "triton")
    alone = dataclasses.replace(
        batch,
        page_table=np.repeat(batch.page_table[:1], 5, axis=0),
        query_starts=np.arange(6, dtype=np.int32),
        kv_lens=np.arange(638, 643, dtype=np.int32),
        num_seqs=5,
    )
    np.testing.assert_array_equal(_bits(_run(case, alone, "triton")[0]), _bits(together))
