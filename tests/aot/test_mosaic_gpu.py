"""Mosaic GPU's kernels compile for an H200 that isn't here: without spills, in its shared memory, the pool in place."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.runtime.devices.topology import target_mesh
from jaxserve.runtime.step.batch import ProgramKey
from pallas_kernels.paged_attention import PagedKV, Problem, choose_backend, paged_attention, target_of
from tests.aot.conftest import Row
from tests.aot.deployments import LLAMA_8B_TWO_LAYERS, deployment
from tests.aot.kernels import fitting_kernels

pytestmark = pytest.mark.aot

TOKENS, LAYERS = 512, 2

# Of keys, and of values: as on a device, more than 32 bits can count.
POOL_BYTES = 5 * 2**30

VARIANTS: dict[str, dict[str, Any]] = {
    "decode": {"decode_only": True},
    "decode-split": {"decode_only": True, "rows": 4, "page_size": 128},
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
    # Other rows than above: a kernel that was compiled before is not said anything about.
    "dim-128": {"rows": 32},
    "dim-128-everything": {"window": 1000, "sinks": True, "cap": 30.0},
    "dim-256-ratio-16-page-128": {"head_dim": 256, "heads": 16, "kv_heads": 1, "page_size": 128, "rows": 8},
    "dim-256-everything": {"head_dim": 256, "heads": 8, "kv_heads": 4, "window": 1000, "sinks": True, "cap": 50.0},
    "fp8-decode": {"fp8": True, "decode_only": True, "page_size": 64},
    "fp8-decode-split": {"fp8": True, "decode_only": True, "rows": 4, "page_size": 128},
    "fp8-dim-64-everything": {
        "fp8": True,
        "head_dim": 64,
        "heads": 9,
        "kv_heads": 3,
        "window": 1000,
        "sinks": True,
        "cap": 30.0,
    },
    "fp8-dim-80-mha-page-32": {"fp8": True, "head_dim": 80, "heads": 32, "kv_heads": 32, "page_size": 32},
    "fp8-dim-96-window": {"fp8": True, "head_dim": 96, "heads": 14, "kv_heads": 2, "window": 100},
    "fp8-dim-128": {"fp8": True, "rows": 32},
    "fp8-dim-128-everything-page-64": {"fp8": True, "page_size": 64, "window": 1000, "sinks": True, "cap": 30.0},
    "fp8-dim-256-split-page-128": {
        "fp8": True,
        "head_dim": 256,
        "heads": 16,
        "kv_heads": 1,
        "page_size": 128,
        "rows": 8,
    },
    "fp8-dim-256-everything": {
        "fp8": True,
        "head_dim": 256,
        "heads": 8,
        "kv_heads": 4,
        "window": 1000,
        "sinks": True,
        "cap": 50.0,
    },
}


def _compile(
    *,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 16,
    rows: int = 64,
    window: int | None = None,
    cap: float | None = None,
    sinks: bool = False,
    decode_only: bool = False,
    fp8: bool = False,
) -> Any:
    mesh = target_mesh("nvidia-h200")
    bf16 = np.dtype(jnp.bfloat16)
    kv_dtype = np.dtype(jnp.float8_e4m3fn) if fp8 else bf16
    problem = Problem(heads, kv_heads, head_dim, page_size, bf16, kv_dtype)
    backend = choose_backend(target_of(mesh.devices.flat[0]), problem, "mosaic_gpu")

    def struct(*shape: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def attention(kv: PagedKV, *arrays: jax.Array, sinks: jax.Array | None) -> Any:
        q, k, v, *rest = arrays
        options = {"window": window, "soft_cap": cap, "sinks": sinks, "decode_only": decode_only, "backend": backend}
        return paged_attention(q, k, v, kv, 1, *rest, scale=head_dim**-0.5, **options)

    tokens = rows if decode_only else TOKENS
    pages = POOL_BYTES // (kv_heads * LAYERS * page_size * head_dim * kv_dtype.itemsize)
    pool = struct(kv_heads, LAYERS * pages, page_size, head_dim, dtype=kv_dtype)
    scales = struct(2, LAYERS, kv_heads, dtype=np.float32) if fp8 else None
    new = struct(tokens, kv_heads, head_dim, dtype=bf16)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(attention, donate_argnums=0).lower(
            PagedKV(pool, pool, LAYERS, scales),
            struct(tokens, heads, head_dim, dtype=bf16),
            new,
            new,
            struct(rows, 8192 // page_size),
            struct(rows + 1),
            struct(rows),
            struct(),
            struct(),
            sinks=struct(heads, dtype=np.float32) if sinks else None,
        )
    return lowered.compile()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_compiles_without_spills(
    variant: str, report: Callable[[Row], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    start = time.monotonic()
    compiled = _compile(**VARIANTS[variant])
    memory = compiled.memory_analysis()
    seconds = time.monotonic() - start
    kernels = fitting_kernels(compiled, "nvidia-h200")
    sizes = memory.temp_size_in_bytes, memory.alias_size_in_bytes
    report(Row("nvidia-h200", "mosaic_gpu", variant, seconds, *sizes, kernels))

    assert memory.alias_size_in_bytes > 0.99 * 2 * POOL_BYTES
    assert memory.temp_size_in_bytes < 2**28
    expected = {"paged_decode"} if "decode_only" in VARIANTS[variant] else {"paged_decode", "paged_prefill"}
    assert {one.kernel: one.calls for one in kernels} == {f"{name} (mosaic gpu)": 1 for name in expected}
    dumped = {path.name.rpartition("_")[0]: path for path in tmp_path.glob("*.ptx")}
    assert set(dumped) == expected
    for path in dumped.values():
        assert "wgmma.mma_async" in path.read_text()
        assembled = path.with_suffix(".ptxas").read_text()
        assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", assembled) == [("0", "0")]


@pytest.mark.parametrize(
    ("tensor", "key", "kv"),
    [
        (1, ProgramKey("mixed", 2048, False), "auto"),
        (4, ProgramKey("decode", 64, True), "auto"),
        (1, ProgramKey("mixed", 2048, False), "fp8"),
    ],
)
def test_a_step_has_its_kernels_and_leaves_the_pool_in_place(
    tensor: int, key: ProgramKey, kv: str, report: Callable[[Row], None]
) -> None:
    """Several layers write into one pool and read from it, each in its turn."""
    builder = deployment("nvidia-h200", LLAMA_8B_TWO_LAYERS, tensor=tensor, attention="mosaic_gpu", kv=kv)
    start = time.monotonic()
    compiled = builder.compile(key)
    memory = compiled.memory_analysis()
    seconds = time.monotonic() - start
    kernels = fitting_kernels(compiled, "nvidia-h200")
    sizes = memory.temp_size_in_bytes, memory.alias_size_in_bytes
    report(Row("nvidia-h200", "2 layers", str(key), seconds, *sizes, kernels))
    assert memory.alias_size_in_bytes > 40 * 2**30
    assert memory.temp_size_in_bytes < 2**30
    names = ("paged_decode",) if key.kind == "decode" else ("paged_decode", "paged_prefill")
    assert {one.kernel: one.calls for one in kernels} == {f"{name} (mosaic gpu)": 2 for name in names}
