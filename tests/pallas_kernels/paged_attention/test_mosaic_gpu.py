"""Mosaic GPU in the interpreter, with race detection: cases of the table in bfloat16 and over fp8, and seeded bugs.

The whole table would take too long. The interpreter ignores swizzles and registers, and doesn't count products as
reads: it doesn't notice a block that is released before its product. Benchmarks run the same cases on a GPU.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from pallas_kernels.paged_attention import BACKENDS, KernelTarget, Problem, choose_backend
from pallas_kernels.paged_attention.mosaic_gpu import backend as mosaic_gpu
from pallas_kernels.paged_attention.mosaic_gpu import convert, decode, parts, prefill
from tests.pallas_kernels.paged_attention import test_paged_attention as suite
from tests.pallas_kernels.paged_attention.cases import CASES, Case, make_batch
from tests.selection import grid

pytestmark = [suite.pytestmark, pytest.mark.interpreted]

CORNERS = (
    "decode",
    "whole-pages-no-padding",
    "nothing-live",
    "shared-pages",
    "heads-2-of-2-dim-80-first-layer",
    "heads-9-of-3-dim-96-page-32",
    "heads-14-of-2-dim-128-page-64",
    "heads-8-of-1-dim-256-page-128",
    "heads-4-of-2-dim-256-bf16-window-cap",
    "heads-6-of-2-dim-192-cap",
    "decode-heads-8-of-1-dim-256-window-cap",
    "decode-heads-32-of-2-dim-128-page-128",
    "decode-heads-16-of-1-dim-256-page-256",
    "prefill-window-16",
    "decode-everything",
    "a-window-far-behind",
    "everything",
    "few-queries",
    "chunks-only-dim-192",
    "few-queries-everything",
    "few-queries-of-a-long-row",
    "few-queries-after-decodes",
)
FP8_CORNERS = (
    "decode-fp8",
    "decode-fp8-dim-256-page-128",
    "decode-heads-3-of-3-dim-80-page-32",
    "heads-8-of-1-dim-256-page-128",
    "fp8-dim-256-bf16-window-cap",
    "decode-fp8-dim-192-bf16-window-cap",
    "fp8-dim-96-page-64",
    "decode-fp8-cap-sinks-first-layer",
    "prefill-fp8-window-cap",
    "few-queries-fp8-bf16-window",
    "few-queries-fp8-dim-256-page-128",
)
FP8: dict[str, Any] = {"kv_dtype": "float8_e4m3fn"}
TABLE = {case.name: dataclasses.replace(case, dtype="bfloat16") for case in CASES}
SHORT: dict[str, Any] = {"dtype": "bfloat16", "heads": 2, "kv_heads": 1, "pad_rows": 0, "pad_tokens": 0}

BF16 = np.dtype(jnp.bfloat16)
H200 = KernelTarget("cuda", "NVIDIA H200", (9, 0))
PROBLEM = Problem(32, 8, 128, 16, BF16, BF16)


@pytest.fixture(autouse=True)
def _small_ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A ring so small that rows of the table fill it several times."""
    monkeypatch.setattr(mosaic_gpu, "_MAX_STAGES", 2)
    suite._compiled.cache_clear()
    yield
    suite._compiled.cache_clear()


@pytest.mark.parametrize("name", grid(CORNERS, lambda name: name in ("everything", "few-queries-everything")))
def test_equals_dense_attention(name: str) -> None:
    suite._check(TABLE[name], make_batch(TABLE[name]), "mosaic_gpu")


@pytest.mark.parametrize("name", grid(FP8_CORNERS, lambda name: name == "decode-fp8"))
def test_over_fp8_equals_dense_attention(name: str) -> None:
    case = dataclasses.replace(TABLE[name], **FP8)
    suite._check(case, make_batch(case), "mosaic_gpu")


@pytest.mark.grid
def test_an_odd_ratio_of_wide_heads_is_padded_in_a_tile() -> None:
    options = {**SHORT, "heads": 13, "head_dim": 144, "sinks": True}
    case = Case("odd", ((700, 1), (90, 25), (17, 17)), 1, page_size=32, **options)
    suite._check(case, make_batch(case), "mosaic_gpu")


@pytest.mark.grid
@settings(max_examples=6, deadline=None, derandomize=True)
@given(case=suite._ragged())
def test_drawn_batches_equal_dense_attention(case: Case) -> None:
    case = dataclasses.replace(case, dtype="bfloat16", window=None)
    pages = -(-suite._LONGEST // suite._PAGE)
    suite._check(case, make_batch(case, max_pages=pages, num_pages=suite._ROWS * pages), "mosaic_gpu")


@pytest.mark.grid
def test_a_row_does_not_depend_on_other_rows() -> None:
    """Compare bits, for a row that is split."""
    batch = make_batch(Case("company", ((600, 1), (700, 1)), 2, decode_only=True, **SHORT))
    case = Case("company", (), 2, decode_only=True, **SHORT)
    shorter = dataclasses.replace(batch, kv_lens=np.array([600, 40], np.int32))
    together, other = (suite._run(case, b, "mosaic_gpu")[0][0] for b in (batch, shorter))
    np.testing.assert_array_equal(suite._bits(other), suite._bits(together))


DECODE = Case("decode", ((300, 1),), 1, decode_only=True, **SHORT)
PREFILL = Case("prefill", ((140, 40), (290, 70)), 0, **SHORT)
# Several blocks for each slot of converted blocks: the third one shows whether the loader waits.
DECODE_FP8 = Case("decode", ((300, 1),), 1, decode_only=True, **FP8, **{**SHORT, "head_dim": 256})
PREFILL_FP8 = Case("prefill", ((40, 40), (1100, 70)), 0, **FP8, **SHORT)
MODULES = {"decode": decode, "prefill": prefill}
BUGS = {
    "read-before-it-arrived": (DECODE, "plgpu.barrier_wait(k_ring.arrived.at[slot])", "pass"),
    "read-before-it-was-converted": (DECODE_FP8, "plgpu.barrier_wait(v_ring.arrived.at[slot])", "pass"),
    "scale-of-keys-left-out": (PREFILL_FP8, "scale_of(scales_ref, 0, head)", "None"),
    "scale-of-values-left-out": (DECODE_FP8, "scale_of(scales_ref, 1, head)", "None"),
    "the-page-after": (DECODE, "jnp.minimum(page, last_page)", "jnp.minimum(page + 1, last_page)"),
    "a-token-past-the-end": (DECODE, "seen = position < length", "seen = position <= length"),
    "values-not-cleared": (DECODE, "clear_outside(v_ring.blocks.at[slot], start, window_start, length)", "pass"),
    "the-future": (PREFILL, "seen = position <= query", "seen = position <= query + 1"),
    "the-next-sequence-overwritten": (PREFILL, "whole = rows - first_row >= TILE_ROWS", "whole = rows >= 0"),
    "values-of-a-chunk-not-cleared": (
        PREFILL,
        "clear_outside(v_ring.blocks.at[slot], start, first_seen, length)",
        "pass",
    ),
}


@pytest.mark.parametrize("bug", grid(BUGS, lambda bug: bug == "read-before-it-arrived"))
def test_the_suite_finds_a_bug(bug: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each bug is put into a copy of a kernel's source."""
    case, right, wrong = BUGS[bug]
    monkeypatch.setattr(mosaic_gpu, case.name, getattr(_spoilt(MODULES[case.name], right, wrong), case.name))
    assert _found(case, capsys)


@pytest.mark.parametrize("case", grid([DECODE, PREFILL], lambda case: False), ids=lambda case: case.name)
def test_the_suite_finds_a_block_overwritten_before_it_is_free(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bug is in the loader that both kernels share."""
    spoilt = _spoilt(parts, "@pl.when(i - low >= stages)", "@pl.when(i < low)")
    monkeypatch.setattr(MODULES[case.name], "fill_rings", spoilt.fill_rings)
    assert _found(case, capsys)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("pl.when(i - low >= attention.slots)", "pl.when(i < low)"),
        ("plgpu.barrier_wait(ring.copied.at[source])", "pass"),
        ("functools.partial(convert, stored, to, rows)", "functools.partial(convert, stored, to)"),
    ],
    ids=["overwritten-before-it-is-free", "converted-before-it-arrived", "values-not-cleared"],
)
@pytest.mark.parametrize("case", grid([DECODE_FP8, PREFILL_FP8], lambda case: False), ids=lambda case: case.name)
def test_the_suite_finds_a_bug_where_fp8_is_converted(
    right: str, wrong: str, case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bug is in the conversion of both kernels' loaders."""
    spoilt = _spoilt(convert, right, wrong)
    monkeypatch.setattr(MODULES[case.name], "convert_rings", spoilt.convert_rings)
    assert _found(case, capsys)


def _spoilt(module: types.ModuleType, right: str, wrong: str) -> types.ModuleType:
    """Return a copy of a module with a bug."""
    source = inspect.getsource(module)
    assert source.count(right) == 1
    copy = types.ModuleType(module.__name__)
    exec(compile(source.replace(right, wrong), "spoilt.py", "exec"), copy.__dict__)
    return copy


def _found(case: Case, capsys: pytest.CaptureFixture[str]) -> bool:
    found = False
    try:
        suite._check(case, make_batch(case), "mosaic_gpu")
    except (AssertionError, jax.errors.JaxRuntimeError):
        found = True
    return "RACE DETECTED" in capsys.readouterr().out or found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": np.dtype(np.float32)}, "queries of bfloat16, not of float32"),
        ({"kv_dtype": np.dtype(jnp.float8_e5m2)}, "a KV cache of bfloat16 or float8_e4m3fn, not of float8_e5m2"),
        ({"head_dim": 72}, "heads of 16 to 256 in steps of 16, not of 72"),
        ({"heads": 136}, "up to 16 query heads a KV head, not 136 for 8"),
        ({"page_size": 8}, "pages of a power of two from 16 on, not of 8 tokens"),
    ],
)
def test_unsupported_problems_are_refused_with_a_reason(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"'mosaic_gpu' can't be used here: mosaic_gpu takes {reason}"):
        choose_backend(H200, dataclasses.replace(PROBLEM, **change), "mosaic_gpu")


def test_it_is_for_hopper_and_only_on_request() -> None:
    assert choose_backend(H200, PROBLEM, "mosaic_gpu").reason == "requested"
    assert choose_backend(H200, PROBLEM).name == "triton"
    for target in (
        KernelTarget("cuda", "NVIDIA B200", (10, 0)),
        KernelTarget("cuda", "NVIDIA L4", (8, 9)),
        KernelTarget("tpu"),
    ):
        assert BACKENDS.refusal("mosaic_gpu", target, (PROBLEM,)) is not None


def test_its_interpreter_needs_enough_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "2")
    assert "set NPROC=8" in str(BACKENDS.refusal("mosaic_gpu", KernelTarget("cpu"), (PROBLEM,)))


def test_the_candidates_include_the_rules_sizes() -> None:
    assert mosaic_gpu._decode_sizes(PROBLEM) in mosaic_gpu.candidates("decode", PROBLEM, H200)
    for masked in (False, True):
        sizes = mosaic_gpu._prefill_sizes(PROBLEM, masked=masked)
        assert sizes in mosaic_gpu.candidates("prefill", PROBLEM, H200)
