"""Triton's kernels compile for GPUs that aren't here, without spilling a register, in the shared memory that a block
has there, and leave the pool in place.

Corners of the case table on an H200 (sm_90), an A100 (sm_80) and an L4 (sm_89, with the smallest shared memory).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.runtime.devices.topology import target_mesh
from jaxserve.runtime.programs.inspection import instructions
from pallas_kernels.paged_attention import PagedKV, Problem, choose_backend, paged_attention, target_of
from tests.aot.conftest import Row
from tests.aot.kernels import fitting_kernels

pytestmark = pytest.mark.aot

TARGETS = ("nvidia-h200", "nvidia-a100-80", "nvidia-l4")
ROWS, TOKENS, LAYERS = 64, 512, 2

# Of keys, and of values. More than 4 GiB, as on a device, are addressed in 64 bits.
POOL_BYTES = 5 * 2**30

FP8 = "float8_e4m3fn"
VARIANTS: dict[str, dict[str, Any]] = {
    "decode": {"decode_only": True},
    "dim-64": {"head_dim": 64},
    "dim-80-mha-window-page-32": {"head_dim": 80, "heads": 32, "kv_heads": 32, "page_size": 32, "window": 100},
    "dim-96-sinks-cap-page-64": {
        "head_dim": 96,
        "heads": 9,
        "kv_heads": 3,
        "page_size": 64,
        "sinks": True,
        "cap": 30.0,
    },
    "dim-128-everything": {"window": 1000, "sinks": True, "cap": 30.0},
    "dim-256-ratio-16-page-128": {"head_dim": 256, "heads": 16, "kv_heads": 1, "page_size": 128},
    "float32": {"dtype": "float32"},
    "fp8-dim-256": {"kv_dtype": FP8, "head_dim": 256},
    "fp8-dim-64-everything": {"kv_dtype": FP8, "head_dim": 64, "window": 100, "sinks": True, "cap": 30.0},
}


def _compile(
    target: str,
    *,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 16,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    window: int | None = None,
    cap: float | None = None,
    sinks: bool = False,
    decode_only: bool = False,
) -> Any:
    mesh = target_mesh(target)
    problem = Problem(heads, kv_heads, head_dim, page_size, jnp.dtype(dtype), jnp.dtype(kv_dtype or dtype))
    backend = choose_backend(target_of(mesh.devices.flat[0]), problem, "triton")

    def struct(*shape: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def attention(kv: PagedKV, *arrays: jax.Array, sinks: jax.Array | None) -> Any:
        q, k, v, *rest = arrays
        options = {"window": window, "soft_cap": cap, "sinks": sinks, "decode_only": decode_only, "backend": backend}
        return paged_attention(q, k, v, kv, 1, *rest, scale=head_dim**-0.5, **options)

    tokens = ROWS if decode_only else TOKENS
    pages = POOL_BYTES // (kv_heads * LAYERS * page_size * head_dim * problem.kv_dtype.itemsize)
    pool = struct(kv_heads, LAYERS * pages, page_size, head_dim, dtype=problem.kv_dtype)
    scales = struct(2, LAYERS, kv_heads, dtype=np.float32) if kv_dtype else None
    new = struct(tokens, kv_heads, head_dim, dtype=problem.dtype)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(attention, donate_argnums=0).lower(
            PagedKV(pool, pool, LAYERS, scales),
            struct(tokens, heads, head_dim, dtype=problem.dtype),
            new,
            new,
            struct(ROWS, 512),
            struct(ROWS + 1),
            struct(ROWS),
            struct(),
            struct(),
            sinks=struct(heads, dtype=np.float32) if sinks else None,
        )
    return lowered.compile({"xla_gpu_fail_ptx_compilation_on_register_spilling": True})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("target", TARGETS)
def test_a_variant_compiles_without_spills(target: str, variant: str, report: Callable[[Row], None]) -> None:
    options = VARIANTS[variant]
    if target == "nvidia-a100-80" and "kv_dtype" in options:
        with pytest.raises(ValueError, match=r"fp8 KV cache needs compute capability 8\.9 .* not NVIDIA A100"):
            _compile(target, **options)
        return
    start = time.monotonic()
    compiled = _compile(target, **options)
    memory = compiled.memory_analysis()
    seconds = time.monotonic() - start
    kernels = fitting_kernels(compiled, target)
    report(Row(target, "triton", variant, seconds, memory.temp_size_in_bytes, memory.alias_size_in_bytes, kernels))

    assert memory.alias_size_in_bytes > 0.99 * 2 * POOL_BYTES
    assert memory.temp_size_in_bytes < 2**28
    expected = {"write", "decode", "combine"} | ({"prefill"} if "decode_only" not in options else set())
    assert {one.kernel for one in kernels} == {f"paged_attention_{name} (triton)" for name in expected}
    assert "scatter" not in {one.opcode for one in instructions(compiled.as_text())}
