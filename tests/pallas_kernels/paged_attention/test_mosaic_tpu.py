"""The TPU kernel with small blocks, so that every kind of copy runs ahead of its use; its refusals; and seeded bugs."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import (
    AttentionOptions,
    Backend,
    KernelTarget,
    PagedKV,
    Problem,
    Rows,
    choose_backend,
    paged_attention,
)
from pallas_kernels.paged_attention.mosaic_tpu import backend as mosaic_tpu
from tests.pallas_kernels.paged_attention import cases
from tests.pallas_kernels.paged_attention import test_paged_attention as suite
from tests.pallas_kernels.paged_attention.cases import Case, make_batch
from tests.selection import grid

pytestmark = pytest.mark.interpreted

PACKAGE = "pallas_kernels.paged_attention"
SMALL = KernelTarget(
    "cpu", blocks=frozenset({("decode", "block_kv", 32), ("prefill", "block_kv", 32), ("prefill", "block_q", 16)})
)
BF16 = np.dtype(jnp.bfloat16)
PROBLEM = Problem(32, 8, 128, 16, BF16, BF16)
FP8 = np.dtype(jnp.float8_e4m3fn)
V6E = KernelTarget("tpu", "TPU v6 lite")
LATENT_ROWS = {"heads": 128, "kv_heads": 1, "head_dim": 576, "value_dim": 512, "page_size": 64}

ROWS = ((150, 1), (40, 1), (33, 1), (1, 1), (90, 50), (20, 20), (70, 7))
BATCH = Case("batch", ROWS, 4)
PAGES_OF_64 = Case("pages-of-64", ROWS, 4, page_size=64)
WINDOW = Case("window", ROWS, 4, window=20)
# A tile of 16 queries has two parts, and the value is 128 of 256 lanes.
LATENT = Case("latent", ROWS, 4, heads=40, kv_heads=1, head_dim=192, value_dim=128)
FEW_LATENT = Case("few-latent", ((150, 4), (40, 1), (33, 3), (19, 4)), 0, max_queries=4, **cases.LATENT)
# Factors of values are there, but latent rows have none.
FP8_LATENT = Case("fp8-latent", ROWS, 4, **{**cases.LATENT, **cases.FP8_BF16}, page_size=64)
CHUNKS_ONLY = Case("chunks-only", ROWS, 4, chunks_only=True)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The suite runs the kernel with small blocks here; other tests don't see what it compiled."""
    suite._compiled.cache_clear()
    monkeypatch.setattr(suite, "target_of", lambda device: SMALL)
    yield
    suite._compiled.cache_clear()
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize(
    "case",
    grid(
        [
            BATCH,
            PAGES_OF_64,
            WINDOW,
            Case("decodes", ROWS[:4], 4, decode_only=True, kv_heads=4),
            Case("fp8-joined", ROWS, 4, kv_dtype="float8_e4m3fn", sinks=True),
            Case("fp8-page-64-dim-80", ROWS, 4, kv_dtype="float8_e4m3fn", head_dim=80, page_size=64, soft_cap=3.0),
            Case("bf16-page-32-window", ROWS, 4, dtype="bfloat16", page_size=32, window=70),
            LATENT,
            FEW_LATENT,
            FP8_LATENT,
            CHUNKS_ONLY,
            Case("latent-sinks-cap", ROWS, 4, **cases.LATENT, sinks=True, soft_cap=3.0),
            Case("latent-few-among-decodes", ((70, 1), (33, 1), (150, 4), (19, 4)), 2, max_queries=4, **cases.LATENT),
            Case("latent-queries-beyond-a-unit", ROWS, 4, max_queries=50, dtype="bfloat16", **cases.LATENT),
        ],
        lambda case: case.name == "fp8-joined",
    ),
    ids=str,
)
def test_small_blocks_and_tiles_equal_dense_attention(case: Case) -> None:
    suite._check(case, make_batch(case), "mosaic_tpu")


def test_a_tpu_chooses_it_by_default() -> None:
    assert choose_backend(V6E, PROBLEM).name == "mosaic_tpu"
    assert choose_backend(V6E, Problem(**(vars(PROBLEM) | LATENT_ROWS))).name == "mosaic_tpu"


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite", "TPU7x"])
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_a_tile_of_latent_rows_fits_vector_memory(kind: str, kv_dtype: np.dtype, heads: int) -> None:
    target = KernelTarget("tpu", kind)
    problem = Problem(**(vars(PROBLEM) | LATENT_ROWS | {"kv_dtype": kv_dtype, "heads": heads}))
    attention = mosaic_tpu._attention(problem, AttentionOptions(1.0), joined=False, writes=True)
    for queries, max_queries in ((1, None), (2048, None), (48, 4)):
        sizes = mosaic_tpu.block_sizes(attention, problem, target, queries=queries, max_queries=max_queries)
        assert mosaic_tpu.vmem_bytes(attention, sizes) <= mosaic_tpu.vmem_limit(target)
        assert sizes.pages * problem.page_size >= 256
        assert sizes.queries % sizes.parts == 0
        assert sizes.queries * heads // sizes.parts <= 512


def test_a_window_over_latent_rows_is_an_error() -> None:
    case = dataclasses.replace(FEW_LATENT, window=20)
    with pytest.raises(ValueError, match="no window over latent rows"):
        suite._run(case, make_batch(case), "mosaic_tpu")


@pytest.mark.parametrize(
    ("target", "change", "reason"),
    [
        (KernelTarget("cuda", "NVIDIA H200", (9, 0)), {}, "compiles for TPUs, not for cuda"),
        (V6E, {"dtype": np.dtype(np.float16)}, "computes in float32 and bfloat16, not in float16"),
        (V6E, {"kv_dtype": np.dtype(np.int8)}, "not of int8"),
        (V6E, {"head_dim": 576}, "heads of up to 512, not of 576"),
        (V6E, {"heads": 34, "kv_heads": 2}, "up to 16 query heads a KV head, not 34 for 2"),
        (V6E, {**LATENT_ROWS, "kv_heads": 2}, "latent rows that all heads of a shard share, not 2 a token"),
        (V6E, {**LATENT_ROWS, "head_dim": 648}, "latent rows of up to 640, not of 648"),
        (V6E, {**LATENT_ROWS, "heads": 129}, "up to 128 query heads a latent row, not 129"),
        (
            KernelTarget("tpu", "TPU7x"),
            {**LATENT_ROWS, "dtype": np.dtype(np.float32), "kv_dtype": FP8},
            "smallest tile of 128 query heads and pages of 64 tokens takes .* MiB of vector memory, more than 48",
        ),
        (
            KernelTarget("tpu", "TPU7x"),
            {"heads": 128, "kv_heads": 128, "head_dim": 192, "page_size": 64},
            "smallest tile of 128 query heads and pages of 64 tokens takes 49 MiB of vector memory, more than 48",
        ),
        (V6E, {"page_size": 8}, "pages of 16 tokens or a larger power of two, not of 8"),
        (V6E, {"page_size": 16384}, "pages of up to 32 MiB, and 16384 tokens of 8 KV heads take 64: choose smaller"),
    ],
)
def test_unsupported_problems_are_refused_with_a_reason(
    target: KernelTarget, change: dict[str, Any], reason: str
) -> None:
    problem = Problem(**(vars(PROBLEM) | change))
    with pytest.raises(ValueError, match=reason):
        choose_backend(target, problem, "mosaic_tpu")


@pytest.mark.parametrize(
    ("lanes", "max_pages", "message"), [(64, 8, "not laid out for a TPU"), (128, 2**16, "larger pages")]
)
def test_memory_that_a_tpu_cannot_hold_is_an_error(lanes: int, max_pages: int, message: str) -> None:
    pool = jnp.zeros((8, 2, 16, lanes))
    kv = PagedKV(pool, pool, 1, page_major=True)
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=np.int32)
    q, new = (jax.ShapeDtypeStruct((4, heads, 64), np.float32) for heads in (4, 2))
    backend = Backend("mosaic_tpu", SMALL)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            functools.partial(paged_attention, options=AttentionOptions(1.0), backend=backend),
            q,
            new,
            new,
            kv,
            0,
            Rows(i32((4, max_pages)), i32((5,)), i32((4,)), i32(()), i32(())),
        )


@dataclasses.dataclass(frozen=True)
class Seed:
    """Replaces `old` by `new` in one of the kernel's files; then `case` must fail."""

    file: str
    old: str
    new: str
    case: Case = BATCH


ATTEND = "            self._attend_past(tile, at, slot)\n"
SEEDS = {
    "pages-not-waited-for": Seed("kernel", "            copies.past(tile, at, slot, wait)\n", ""),
    "pages-used-before-they-are-there": Seed(
        "kernel",
        "            copies.past(tile, at, slot, wait)\n" + ATTEND,
        ATTEND + "            copies.past(tile, at, slot, wait)\n",
    ),
    "buffer-released-early": Seed("kernel", "pl.when(i > 0)(lambda: copies.writes(copies.tile(i - 1), wait))", "pass"),
    "read-before-written": Seed("kernel", "                copies.writes(tile, wait)\n", "                pass\n"),
    "inputs-not-waited-for": Seed("kernel", "        copies.inputs(tile, wait)\n", ""),
    "outputs-out-of-order": Seed("kernel", "pl.when(i > 0)(lambda: copies.out(copies.tile(i - 1), wait))", "pass"),
    "not-causal": Seed("kernel", "attention.group <= query", "attention.group <= query + attention.group"),
    "not-read-not-masked": Seed("kernel", "jnp.where(held[None], self._tokens(values), 0.0)", "self._tokens(values)"),
    "window-one-too-wide": Seed("kernel", "ahead + self.attention.window", "ahead + self.attention.window + 1", WINDOW),
    "tokens-of-the-pool-lost": Seed("kernel", "(at >= tile.position) & (at < tile.end)", "at < tile.end"),
    "off-by-one-page": Seed("memory", "self._entry(tile, page)", "self._entry(tile, page + 1)"),
    "another-layer": Seed("memory", "self.operands.counts[2] + ", ""),
    "values-of-other-lanes": Seed(
        "kernel", "[:, :, : self.attention.value_lanes]", "[:, :, -self.attention.value_lanes :]", LATENT
    ),
    "parts-as-the-first": Seed("kernel", "query + part.queries.start * attention.group", "query", LATENT),
    "parts-stored-as-the-first": Seed(
        "kernel", "s.out[slot, part.queries, part.heads]", "s.out[slot, 0:8, 0:1]", LATENT
    ),
    "the-last-unit-of-few-queries-left-out": Seed(
        "memory", "sizes.queries + attention.unit - 1", "sizes.queries", FEW_LATENT
    ),
    "another-factor-for-values": Seed("backend", "kv.scales[:1]", "kv.scales", FP8_LATENT),
    "decodes-not-left-out": Seed("backend", "None if rows.chunks_only else ", "", CHUNKS_ONLY),
    "part-of-a-page-left-out": Seed("memory", "fori_loop(0, jnp.where(", "fori_loop(1, jnp.where(", PAGES_OF_64),
}


QUICK = ("inputs-not-waited-for", "off-by-one-page")


@pytest.mark.parametrize("bug", grid(SEEDS, lambda bug: bug in QUICK))
def test_a_seeded_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seed = SEEDS[bug]
    module = importlib.import_module(f"{PACKAGE}.mosaic_tpu.{seed.file}")
    source = Path(str(module.__file__)).read_text()
    assert source.count(seed.old) == 1
    for name in ("backend", "sizes", "kernel", "memory"):
        monkeypatch.delitem(sys.modules, f"{PACKAGE}.mosaic_tpu.{name}", raising=False)
    seeded = types.ModuleType(module.__name__)
    monkeypatch.setitem(sys.modules, module.__name__, seeded)
    exec(compile(source.replace(seed.old, seed.new), str(module.__file__), "exec"), seeded.__dict__)
    found: Exception | None = None
    try:
        suite._check(seed.case, make_batch(seed.case), "mosaic_tpu")
    except (AssertionError, jax.errors.JaxRuntimeError) as error:
        found = error
    raced = "RACE DETECTED" in capsys.readouterr().out
    assert raced or isinstance(found, AssertionError) or "race" in str(found).lower()
