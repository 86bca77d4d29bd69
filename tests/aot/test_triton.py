"""Triton's kernels compile for GPUs without one: no spills, as many programs at once as they count on.

Some cases of the table, on an H200 (sm_90), an A100 (sm_80), an L4 (sm_89, with the smallest shared memory) and a B200
(sm_100). The pool is updated in place.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve.runtime.devices.target import load_target
from jaxserve.runtime.devices.topology import target_mesh
from jaxserve.runtime.programs.hlo import instructions
from jaxserve.runtime.programs.inspection import KernelReport
from pallas_kernels.paged_attention import Problem, target_of
from pallas_kernels.paged_attention.triton import block_sizes
from tests.aot.conftest import Row
from tests.aot.kernels import E5M2, FP8, POOL_BYTES, checked_kernels, compile_attention
from tests.selection import grid

pytestmark = pytest.mark.aot

TARGETS = ("nvidia-h200", "nvidia-a100-80", "nvidia-l4", "nvidia-b200")
SYSTEM_SHARED_BYTES = 1024
REFUSE_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "decode": {"decode_only": True},
    "reuses": {"reuses": True},
    "few-queries": {"max_queries": 5},
    "few-queries-8-to-1": {"max_queries": 8, "heads": 64, "rows": 512},
    "few-queries-of-many-heads": {"max_queries": 17, "heads": 16, "kv_heads": 1, "rows": 32},
    "few-queries-of-many-heads-everything": {
        "max_queries": 5,
        "heads": 16,
        "kv_heads": 1,
        "head_dim": 96,
        "window": 1000,
        "sinks": True,
        "cap": 30.0,
    },
    "few-queries-dim-256-window-cap": {"max_queries": 8, "head_dim": 256, "heads": 16, "window": 4096, "cap": 50.0},
    "few-queries-fp8-everything": {"max_queries": 5, "kv_dtype": FP8, "window": 1000, "sinks": True, "cap": 30.0},
    "few-queries-dim-512": {"max_queries": 5, "head_dim": 512, "heads": 16, "kv_heads": 2},
    "few-queries-float32": {"max_queries": 5, "dtype": "float32"},
    "few-queries-dim-64-e5m2": {"max_queries": 8, "kv_dtype": E5M2, "head_dim": 64},
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
    "dim-256-window-cap": {"head_dim": 256, "heads": 16, "window": 4096, "cap": 50.0},
    "dim-192-7-to-1": {"head_dim": 192, "heads": 14, "kv_heads": 2},
    "dim-192-window-cap": {"head_dim": 192, "heads": 16, "window": 4096, "cap": 50.0},
    "fp8-dim-256-window-cap": {"kv_dtype": FP8, "head_dim": 256, "heads": 16, "window": 4096, "cap": 50.0},
    "dim-512-ratio-8": {"head_dim": 512, "heads": 16, "kv_heads": 2},
    "dim-512-ratio-16-window-cap": {"head_dim": 512, "heads": 16, "kv_heads": 1, "window": 1024, "cap": 50.0},
    "dim-320-7-to-1": {"head_dim": 320, "heads": 14, "kv_heads": 2},
    "fp8-dim-512-everything": {
        "kv_dtype": FP8,
        "head_dim": 512,
        "heads": 8,
        "kv_heads": 4,
        "page_size": 64,
        "window": 1024,
        "sinks": True,
        "cap": 50.0,
    },
    "float32-dim-512": {"dtype": "float32", "head_dim": 512, "heads": 8, "kv_heads": 1},
    "float32": {"dtype": "float32"},
    "fp8-dim-256": {"kv_dtype": FP8, "head_dim": 256},
    "fp8-dim-64-everything": {"kv_dtype": FP8, "head_dim": 64, "window": 100, "sinks": True, "cap": 30.0},
    "e5m2-dim-64-everything": {"kv_dtype": E5M2, "head_dim": 64, "window": 100, "sinks": True, "cap": 30.0},
    "e5m2-dim-128-everything": {"kv_dtype": E5M2, "window": 1000, "sinks": True, "cap": 30.0},
    "e5m2-dim-256-window-cap": {"kv_dtype": E5M2, "head_dim": 256, "heads": 16, "window": 4096, "cap": 50.0},
}


QUICK = {
    "nvidia-h200": (
        "decode",
        "reuses",
        "few-queries",
        "few-queries-dim-256-window-cap",
        "dim-96-sinks-cap-page-64",
        "dim-128-everything",
        "dim-512-ratio-8",
        "fp8-dim-64-everything",
    ),
    "nvidia-a100-80": ("decode", "dim-192-7-to-1", "fp8-dim-256", "e5m2-dim-128-everything"),
    "nvidia-l4": ("dim-128-everything", "few-queries", "dim-256-window-cap"),
    "nvidia-b200": ("dim-256-ratio-16-page-128",),
}
CASES = grid(itertools.product(TARGETS, VARIANTS), lambda case: case[1] in QUICK[case[0]])


@pytest.mark.parametrize(("target", "variant"), CASES)
def test_a_variant_compiles_without_spills(target: str, variant: str, report: Callable[[Row], None]) -> None:
    mesh, options = target_mesh(target), VARIANTS[variant]
    if target == "nvidia-a100-80" and options.get("kv_dtype") == FP8:
        with pytest.raises(ValueError, match=r"float8_e4m3fn needs compute capability 8\.9 .* not NVIDIA A100"):
            compile_attention(mesh, "triton", **options)
        return
    start = time.monotonic()
    compiled = compile_attention(mesh, "triton", compiler_options=REFUSE_SPILLS, **options)
    memory = compiled.memory_analysis()
    seconds = time.monotonic() - start
    kernels = checked_kernels(compiled, target)
    report(Row(target, "triton", variant, seconds, memory.temp_size_in_bytes, memory.alias_size_in_bytes, kernels))

    assert memory.alias_size_in_bytes > 0.99 * POOL_BYTES
    assert memory.temp_size_in_bytes < 2**28
    expected = {"write", "decode"} | (set() if {"decode_only", "max_queries"} & set(options) else {"prefill"})
    assert {one.kernel for one in kernels} == {f"paged_attention_{name} (triton)" for name in expected}
    assert "scatter" not in {one.opcode for one in instructions(compiled.as_text())}
    wanted = programs_at_once(mesh, options)
    for one in kernels:
        if one.kernel in wanted:
            assert wanted[one.kernel] <= fitting_programs(one, target), one


def test_a_layer_of_few_queries_has_no_launch_more_than_one_of_decodes() -> None:
    mesh = target_mesh("nvidia-h200")

    def launches(**options: Any) -> int:
        """Return how many launches two more layers add: what all layers share is computed once."""
        texts = (compile_attention(mesh, "triton", reuses=more, **options).as_text() for more in (False, True))
        few, many = (sum(x.opcode in ("fusion", "custom-call", "copy") for x in instructions(text)) for text in texts)
        return many - few

    assert launches(max_queries=5) <= launches(decode_only=True)


def programs_at_once(mesh: Mesh, options: dict[str, Any]) -> dict[str, int]:
    """Return how many programs of each persistent kernel the backend counts on."""
    sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": "bfloat16", **options}
    dtypes = (np.dtype(jnp.dtype(sizes.get(name) or sizes["dtype"])) for name in ("dtype", "kv_dtype"))
    problem = Problem(*(sizes[name] for name in ("heads", "kv_heads", "head_dim", "page_size")), *dtypes)
    device, queries = target_of(mesh.devices.flat[0]), sizes.get("max_queries", 1)
    return {
        "paged_attention_decode (triton)": block_sizes.decode_blocks_for(
            problem, device, rows=64, queries=queries
        ).programs,
        "paged_attention_prefill (triton)": block_sizes.prefill_blocks_for(problem, device).programs,
    }


def fitting_programs(kernel: KernelReport, target: str) -> int:
    """Return how many programs the target runs at once by registers, which come by eight, and shared memory."""
    config = load_target(target).target_config or ""
    [cores, shared, registers] = (
        int(re.findall(rf"{name}: (\d+)", config)[0])
        for name in ("core_count", "shared_memory_per_core", "registers_per_core_limit")
    )
    assert kernel.registers
    assert kernel.threads
    assert kernel.shared_bytes is not None
    by_registers = registers // (-(-kernel.registers // 8) * 8 * kernel.threads)
    return cores * min(by_registers, shared // (kernel.shared_bytes + SYSTEM_SHARED_BYTES))
