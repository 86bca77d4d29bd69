"""Tests of the CPU's kernel beyond the table of cases: other CPUs, long rows, odd shapes, a pool updated in place."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import cpu_features, tile_registers
from pallas_kernels.cpu.emit import Module
from pallas_kernels.paged_attention import (
    AttentionOptions,
    Backend,
    BackendName,
    PagedKV,
    Rows,
    kv_layout,
    paged_attention,
)
from pallas_kernels.paged_attention.cpu import backend as cpu
from pallas_kernels.paged_attention.cpu import blocks
from pallas_kernels.paged_attention.cpu.blocks import CHUNK
from tests.pallas_kernels.paged_attention import test_paged_attention as suite
from tests.pallas_kernels.paged_attention.cases import CASES, Batch, Case, make_batch
from tests.pallas_kernels.quantized_matmul.cpu.paths import EmulatedRegisters
from tests.selection import grid

pytestmark = pytest.mark.slow

LONG = Case("long", ((3 * CHUNK + 40, 1), (CHUNK, 1), (CHUNK + 1, 1), (2 * CHUNK + 9, 30)), 3)
TABLE = {case.name: case for case in CASES}
CORNERS = (
    "heads-9-of-3-dim-96-page-32",
    "heads-2-of-2-dim-80-first-layer",
    "decode-everything",
    "everything",
    "latent-bf16-page-64",
)


class OtherCpu(cpu.PagedAttention):
    """The kernel for another CPU than this one."""

    @property
    def name(self) -> str:
        return f"{super().name}_{type(self).__name__}"


class WithoutFeatures(OtherCpu):
    """The kernel for a CPU without optional features."""

    def write(self, module: Module, features: frozenset[str]) -> None:
        super().write(module, frozenset())


class WithoutTiles(OtherCpu):
    """The kernel for this CPU without tile registers."""

    def write(self, module: Module, features: frozenset[str]) -> None:
        super().write(module, features - tile_registers.FEATURES)


class EmulatedTiles(OtherCpu):
    """The kernel for a CPU with tile registers, where `EmulatedRegisters` take their place."""

    def write(self, module: Module, features: frozenset[str]) -> None:
        super().write(module, features | tile_registers.FEATURES)


@pytest.fixture
def _other_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu, "PagedAttention", request.param)
    suite._compiled.cache_clear()
    yield
    suite._compiled.cache_clear()


@pytest.mark.usefixtures("_other_cpu")
@pytest.mark.parametrize("_other_cpu", [WithoutFeatures, WithoutTiles], indirect=True)
@pytest.mark.parametrize("name", grid(CORNERS, lambda name: name in ("everything", "latent-bf16-page-64")))
def test_a_cpu_with_less_computes_the_same(name: str) -> None:
    case = dataclasses.replace(TABLE[name], dtype="bfloat16")
    suite._check(case, make_batch(case), "cpu")


@pytest.mark.skipif("avx512bf16" not in cpu_features(), reason="registers are emulated by AVX512_BF16")
@pytest.mark.parametrize(
    "case",
    [
        LONG,
        dataclasses.replace(LONG, window=CHUNK + 100, sinks=True),
        TABLE["decode-everything"],
        dataclasses.replace(LONG, heads=20, kv_heads=1, head_dim=96, value_dim=64),
    ],
    ids=["long", "window", "decode", "latent"],
)
def test_tile_registers_compute_what_their_manual_says(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(case, dtype="bfloat16")
    batch = make_batch(case)
    if cpu_features() >= tile_registers.FEATURES:
        by_hardware = suite._run(case, batch, "cpu")[0]
    monkeypatch.setattr(cpu, "PagedAttention", EmulatedTiles)
    monkeypatch.setattr(blocks, "TileRegisters", EmulatedRegisters)
    suite._compiled.cache_clear()
    suite._check(case, batch, "cpu")
    if cpu_features() >= tile_registers.FEATURES:
        np.testing.assert_array_equal(suite._bits(suite._run(case, batch, "cpu")[0]), suite._bits(by_hardware))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("more", [{}, {"window": CHUNK + 100, "sinks": True}], ids=["plain", "window"])
def test_the_chunks_of_a_long_row_are_merged(dtype: str, more: dict[str, Any]) -> None:
    case = dataclasses.replace(LONG, dtype=dtype, **more)
    suite._check(case, make_batch(case), "cpu")


@pytest.mark.usefixtures("_other_cpu")
@pytest.mark.parametrize(
    ("dtype", "_other_cpu"),
    [("float32", cpu.PagedAttention), ("bfloat16", cpu.PagedAttention), ("bfloat16", WithoutTiles)],
    indirect=["_other_cpu"],
)
@pytest.mark.parametrize(
    "more",
    [
        {"heads": 9, "kv_heads": 3},
        {"heads": 9, "kv_heads": 3, "window": CHUNK + 100, "sinks": True, "soft_cap": 9.0},
        {"heads": 9, "kv_heads": 1, "head_dim": 48, "value_dim": 32},
        {"heads": 24, "kv_heads": 1, "head_dim": 96, "value_dim": 64, "window": CHUNK + 100, "sinks": True},
    ],
    ids=["plain", "window", "latent", "latent-window"],
)
def test_a_token_has_the_same_bits_in_prefill_and_decode(dtype: str, more: dict[str, Any]) -> None:
    """Compare the last token of a prefill chunk, a chunk of one token, a decode, and the last of a few queries."""
    lengths = (2 * CHUNK + 75, CHUNK, CHUNK + 1, 64, 65, 30)
    shape: dict[str, Any] = {"dtype": dtype, "pad_rows": 0, "pad_tokens": 0, **more}
    case = Case("chunks", tuple((length, min(length, 50)) for length in lengths), 0, **shape)
    batch = make_batch(case)
    whole, keys, values = suite._run(case, batch, "cpu")
    last = batch.query_starts[1:] - 1
    own = dataclasses.replace(
        batch,
        **_tokens(batch, last),
        keys=keys,
        values=values,
        query_starts=np.arange(len(lengths) + 1, dtype=np.int32),
    )
    for num_decodes in (0, len(lengths)):
        out, *_ = suite._run(case, dataclasses.replace(own, num_decodes=num_decodes), "cpu")
        np.testing.assert_array_equal(suite._bits(out), suite._bits(whole[last]))
    few = [min(new, row + 2) for row, (_, new) in enumerate(case.rows)]
    tokens = np.concatenate([np.arange(end - count, end) for end, count in zip(last + 1, few, strict=True)])
    own = dataclasses.replace(
        own,
        **_tokens(batch, tokens),
        query_starts=np.cumsum([0, *few]).astype(np.int32),
        num_decodes=0,
    )
    out, *_ = suite._run(dataclasses.replace(case, max_queries=max(few)), own, "cpu")
    np.testing.assert_array_equal(suite._bits(out), suite._bits(whole[tokens]))


def _tokens(batch: Batch, chosen: np.ndarray) -> dict[str, np.ndarray | None]:
    """Return the queries, keys and values of some tokens. Latent rows have no values of their own."""
    arrays = {"q": batch.q, "k": batch.k, "v": batch.v}
    return {name: None if array is None else array[chosen] for name, array in arrays.items()}


@pytest.mark.parametrize("heads", [16, 128])
def test_a_latent_token_has_the_same_bits_in_any_company(heads: int) -> None:
    """Compare a decode beside many others, whose tiles have many rows of queries, with the same one alone."""
    rows = ((2 * CHUNK + 75, 1), *((40 + i, 1) for i in range(12)), (300, 90))
    case = Case("company", rows, 13, heads=heads, kv_heads=1, head_dim=48, value_dim=32, pad_rows=0, pad_tokens=0)
    batch = make_batch(case)
    together, keys, values = suite._run(case, batch, "cpu")
    for row, last in ((0, 0), (13, batch.query_starts[-1] - 1)):
        lonely = dataclasses.replace(
            batch,
            **_tokens(batch, np.array([last])),
            keys=keys,
            values=values,
            page_table=batch.page_table[[row]],
            query_starts=np.arange(2, dtype=np.int32),
            kv_lens=batch.kv_lens[[row]],
            num_decodes=1,
            num_seqs=1,
        )
        out, *_ = suite._run(case, lonely, "cpu")
        np.testing.assert_array_equal(suite._bits(out[0]), suite._bits(together[last]))


LATENT_SHAPES: list[dict[str, Any]] = [
    {"heads": 5, "head_dim": 80, "value_dim": 48, "dtype": "float32"},
    {"heads": 33, "head_dim": 112, "value_dim": 112, "page_size": 48, "dtype": "bfloat16"},
    {"heads": 16, "head_dim": 48, "value_dim": 16, "window": 50, "soft_cap": 9.0, "sinks": True, "dtype": "bfloat16"},
]


@pytest.mark.parametrize("shape", LATENT_SHAPES)
def test_odd_shapes_of_latent_rows(shape: dict[str, Any]) -> None:
    case = Case("odd-latent", ((CHUNK + 90, 1), (70, 25), (17, 17), (CHUNK + 64, 3)), 1, kv_heads=1, **shape)
    suite._check(case, make_batch(case), "cpu")


ODD: list[dict[str, Any]] = [
    {"heads": 13, "kv_heads": 1, "head_dim": 144},
    {"heads": 71, "kv_heads": 1, "head_dim": 64, "sinks": True},
    {"heads": 120, "kv_heads": 1, "head_dim": 16, "page_size": 48},
    {"heads": 7, "kv_heads": 7, "head_dim": 256, "soft_cap": 9.0},
    {"heads": 24, "kv_heads": 1, "head_dim": 512, "window": 50},
]


@pytest.mark.parametrize("shape", grid(ODD, lambda shape: shape["head_dim"] < 256))
def test_odd_shapes(shape: dict[str, Any]) -> None:
    case = Case("odd", ((90, 1), (70, 25), (17, 17)), 1, dtype="bfloat16", **shape)
    suite._check(case, make_batch(case), "cpu")


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), grid([("float32", "bfloat16"), ("bfloat16", "float32")], lambda types: types[0] == "float32")
)
def test_queries_and_pool_of_two_types(dtype: str, kv_dtype: str) -> None:
    case = dataclasses.replace(LONG, dtype=dtype, head_dim=80)
    batch = make_batch(case)
    pools = {"keys": batch.keys.astype(kv_dtype), "values": batch.values.astype(kv_dtype)}
    names: tuple[BackendName, ...] = ("cpu", "reference")
    ours, theirs = (suite._run(case, dataclasses.replace(batch, **pools), name) for name in names)
    live = batch.query_starts[batch.num_seqs]
    np.testing.assert_allclose(ours[0][:live].astype(np.float32), theirs[0][:live].astype(np.float32), atol=1e-2)
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        np.testing.assert_array_equal(suite._bits(mine), suite._bits(other))


@pytest.mark.parametrize("decode_only", [False, True])
def test_a_step_copies_no_pool(decode_only: bool) -> None:
    """Cover a pool with an axis of ranks, as the engine's is."""
    count, layers = 4, 3
    layout = kv_layout(
        num_layers=layers, num_pages=1000, page_size=16, num_kv_heads=2, head_dim=64, dtype=np.dtype(jnp.bfloat16)
    )

    def step(kv: PagedKV, q: jax.Array, *where: jax.Array) -> tuple[jax.Array, PagedKV]:
        attend = functools.partial(paged_attention, options=AttentionOptions(0.1), backend=Backend("cpu"))
        rows = Rows(*where, decode_only=decode_only)
        kv = kv.with_pools([pool[0] for pool in kv.pools])
        for layer in range(layers):
            q, kv = attend(q, q[:, :2], q[:, 2:4], kv, layer, rows)
            q, kv = attend(q, None, None, kv, layer, rows)
        return q, kv.with_pools([pool[None] for pool in kv.pools])

    pool = jax.ShapeDtypeStruct((1, *layout.shape), layout.dtype)
    shapes = ((count, 10), (count + 1,), (count,), (), ())
    where = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    q = jax.ShapeDtypeStruct((count, 4, 64), jnp.bfloat16)
    compiled = jax.jit(step, donate_argnums=0).lower(layout.paged_kv(pool, pool), q, *where).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == layout.nbytes
    assert memory.temp_size_in_bytes < layout.nbytes / 100
