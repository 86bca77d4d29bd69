"""Mosaic GPU's kernels compile for an H200 without one: no spills, within shared memory, the pool updated in place."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.runtime.devices.topology import target_mesh
from jaxserve.runtime.step.program import ProgramKey
from tests.aot.conftest import Row
from tests.aot.deployments import LLAMA_8B_TWO_LAYERS, deployment
from tests.aot.kernels import FP8, POOL_BYTES, checked_kernels, compile_attention
from tests.selection import grid

pytestmark = pytest.mark.aot

VARIANTS: dict[str, dict[str, Any]] = {
    "decode": {"decode_only": True},
    "decode-reuses": {"decode_only": True, "reuses": True, "rows": 16},
    "decode-split": {"decode_only": True, "rows": 4, "page_size": 128},
    "few-queries": {"max_queries": 5},
    "few-queries-of-many-heads": {"max_queries": 17, "heads": 16, "kv_heads": 1, "rows": 32},
    "few-queries-dim-256-window-cap": {"max_queries": 8, "head_dim": 256, "heads": 16, "window": 4096, "cap": 50.0},
    "few-queries-fp8-everything": {"max_queries": 5, "kv_dtype": FP8, "window": 1000, "sinks": True, "cap": 30.0},
    "dim-64": {"head_dim": 64, "heads": 9, "kv_heads": 3},
    "dim-80-mha-window-page-32": {"head_dim": 80, "heads": 32, "kv_heads": 32, "page_size": 32, "window": 100},
    "dim-96-sinks-cap-page-64": {
        "head_dim": 96,
        "heads": 14,
        "kv_heads": 2,
        "page_size": 64,
        "sinks": True,
        "cap": 30.0,
    },
    # Other numbers of rows than above: for a kernel that was compiled before, nothing is dumped.
    "dim-128": {"rows": 32},
    "dim-128-everything": {"window": 1000, "sinks": True, "cap": 30.0},
    "dim-256-ratio-16-page-128": {"head_dim": 256, "heads": 16, "kv_heads": 1, "page_size": 128, "rows": 8},
    "dim-256-everything": {"head_dim": 256, "heads": 8, "kv_heads": 4, "window": 1000, "sinks": True, "cap": 50.0},
    "decode-dim-256-window-cap": {"head_dim": 256, "heads": 16, "decode_only": True, "window": 4096, "cap": 50.0},
    "dim-192-window-cap": {"head_dim": 192, "heads": 16, "window": 4096, "cap": 50.0},
    "fp8-decode": {"kv_dtype": FP8, "decode_only": True, "page_size": 64},
    "fp8-decode-split": {"kv_dtype": FP8, "decode_only": True, "rows": 4, "page_size": 128},
    "fp8-dim-64-everything": {
        "kv_dtype": FP8,
        "head_dim": 64,
        "heads": 9,
        "kv_heads": 3,
        "window": 1000,
        "sinks": True,
        "cap": 30.0,
    },
    "fp8-dim-80-mha-page-32": {"kv_dtype": FP8, "head_dim": 80, "heads": 32, "kv_heads": 32, "page_size": 32},
    "fp8-dim-96-window": {"kv_dtype": FP8, "head_dim": 96, "heads": 14, "kv_heads": 2, "window": 100},
    "fp8-dim-128": {"kv_dtype": FP8, "rows": 32},
    "fp8-dim-128-everything-page-64": {"kv_dtype": FP8, "page_size": 64, "window": 1000, "sinks": True, "cap": 30.0},
    "fp8-dim-256-split-page-128": {
        "kv_dtype": FP8,
        "head_dim": 256,
        "heads": 16,
        "kv_heads": 1,
        "page_size": 128,
        "rows": 8,
    },
    "fp8-dim-192-window-cap": {"kv_dtype": FP8, "head_dim": 192, "heads": 16, "window": 4096, "cap": 50.0},
    "fp8-dim-256-everything": {
        "kv_dtype": FP8,
        "head_dim": 256,
        "heads": 8,
        "kv_heads": 4,
        "window": 1000,
        "sinks": True,
        "cap": 50.0,
    },
}


QUICK = (
    "decode-split",
    "few-queries",
    "dim-80-mha-window-page-32",
    "dim-128",
    "dim-192-window-cap",
    "dim-256-everything",
    "decode-dim-256-window-cap",
    "fp8-dim-64-everything",
)


@pytest.mark.parametrize("variant", grid(VARIANTS, QUICK.__contains__))
def test_a_variant_compiles_without_spills(
    variant: str, report: Callable[[Row], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    start = time.monotonic()
    compiled = compile_attention(target_mesh("nvidia-h200"), "mosaic_gpu", **VARIANTS[variant])
    memory = compiled.memory_analysis()
    seconds = time.monotonic() - start
    kernels = checked_kernels(compiled, "nvidia-h200")
    sizes = memory.temp_size_in_bytes, memory.alias_size_in_bytes
    report(Row("nvidia-h200", "mosaic_gpu", variant, seconds, *sizes, kernels))

    assert memory.alias_size_in_bytes > 0.99 * POOL_BYTES
    assert memory.temp_size_in_bytes < 2**28
    decodes = {"decode_only", "max_queries"} & set(VARIANTS[variant])
    expected = {"paged_decode"} if decodes else {"paged_decode", "paged_prefill"}
    calls = 3 if "reuses" in VARIANTS[variant] else 1
    assert {one.kernel: one.calls for one in kernels} == {f"{name} (mosaic gpu)": calls for name in expected}
    dumped = {path.name.rpartition("_")[0]: path for path in tmp_path.glob("*.ptx")}
    assert set(dumped) == expected
    for path in dumped.values():
        assert "wgmma.mma_async" in path.read_text()
        assembled = path.with_suffix(".ptxas").read_text()
        assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", assembled) == [("0", "0")]


@pytest.mark.parametrize(
    ("tensor", "key", "kv"),
    grid(
        [
            (1, ProgramKey("mixed", 2048, False), "auto"),
            (4, ProgramKey("decode", 64, True), "auto"),
            (1, ProgramKey("mixed", 2048, False), "fp8"),
        ],
        lambda case: case[0] == 4,
    ),
)
def test_a_step_has_its_kernels_and_leaves_the_pool_in_place(
    tensor: int, key: ProgramKey, kv: str, report: Callable[[Row], None]
) -> None:
    """Several layers write into one pool and read from it, one after another."""
    builder = deployment("nvidia-h200", LLAMA_8B_TWO_LAYERS, tensor=tensor, attention="mosaic_gpu", kv=kv)
    start = time.monotonic()
    compiled = builder.compile(key)
    memory = compiled.memory_analysis()
    seconds = time.monotonic() - start
    kernels = checked_kernels(compiled, "nvidia-h200")
    sizes = memory.temp_size_in_bytes, memory.alias_size_in_bytes
    report(Row("nvidia-h200", "2 layers", str(key), seconds, *sizes, kernels))
    assert memory.alias_size_in_bytes > 40 * 2**30
    assert memory.temp_size_in_bytes < 2**30
    names = ("paged_decode",) if key.kind == "decode" else ("paged_decode", "paged_prefill")
    found = {one.kernel: one.calls for one in kernels}
    assert found == {f"{name} (mosaic gpu)": 2 for name in names} | {"paged_attention_write_qkv (triton)": 2}
