"""The TPU kernel compiles for TPUs without one, and updates the pool in place: some cases of the table."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.runtime.devices.topology import target_mesh
from jaxserve.runtime.programs.hlo import instructions
from jaxserve.runtime.programs.inspection import own_kernels_of
from tests.aot.conftest import Row
from tests.aot.kernels import E5M2, FP8, POOL_BYTES, compile_attention
from tests.selection import grid

pytestmark = pytest.mark.aot

# The number of devices of the smallest topology of each.
TARGETS = {"tpu-v5e": 1, "tpu-v6e": 1, "tpu-v7": 2}
MAX_PAGES = 4096
# The rows of DeepSeek-V3
LATENT = {"head_dim": 576, "value_dim": 512, "kv_heads": 1, "page_size": 64}

VARIANTS: dict[str, dict[str, Any]] = {
    "decode": {"decode_only": True},
    "reuses": {"reuses": True},
    "decode-fp8-dim-64": {"kv_dtype": FP8, "head_dim": 64, "decode_only": True},
    "dim-64": {"head_dim": 64, "heads": 9, "kv_heads": 3},
    "dim-80-mha-window": {"head_dim": 80, "heads": 32, "kv_heads": 32, "page_size": 32, "window": 100},
    "dim-96-sinks-cap": {"head_dim": 96, "heads": 14, "kv_heads": 2, "page_size": 64, "sinks": True, "cap": 30.0},
    "dim-128-everything": {"window": 1000, "sinks": True, "cap": 30.0},
    "dim-256-ratio-16": {"head_dim": 256, "heads": 16, "kv_heads": 1, "page_size": 128},
    "dim-256-mha": {"head_dim": 256, "heads": 16, "kv_heads": 16},
    "dim-256-window-cap": {"head_dim": 256, "heads": 16, "window": 4096, "cap": 50.0},
    "dim-192-window-cap": {"head_dim": 192, "heads": 16, "window": 4096, "cap": 50.0},
    "fp8-dim-256-window-cap": {"kv_dtype": FP8, "head_dim": 256, "heads": 16, "window": 4096, "cap": 50.0},
    "dim-512": {"head_dim": 512, "heads": 16, "kv_heads": 2},
    "dim-512-page-128-window-cap": {
        "head_dim": 512,
        "heads": 8,
        "kv_heads": 1,
        "page_size": 128,
        "window": 1024,
        "cap": 50.0,
    },
    "fp8-dim-512-ratio-16-window": {"kv_dtype": FP8, "head_dim": 512, "heads": 32, "kv_heads": 2, "window": 1024},
    "float32": {"dtype": "float32", "heads": 8, "kv_heads": 2},
    "fp8-everything": {"kv_dtype": FP8, "window": 100, "sinks": True, "cap": 30.0},
    "latent-decode": {**LATENT, "heads": 128, "decode_only": True},
    "latent": {**LATENT, "heads": 128},
    "latent-fp8": {**LATENT, "heads": 128, "kv_dtype": FP8},
    "latent-heads-16": {**LATENT, "heads": 16, "chunks_only": True},
    "latent-few-queries": {**LATENT, "heads": 128, "max_queries": 3},
    "latent-fp8-heads-20-few-queries": {**LATENT, "heads": 20, "kv_dtype": FP8, "max_queries": 5, "page_size": 32},
    "latent-tiny": {"head_dim": 24, "value_dim": 16, "kv_heads": 1, "heads": 4, "dtype": "float32", "max_queries": 3},
    "chunks-only-dim-192-mha": {"head_dim": 192, "heads": 16, "kv_heads": 16, "page_size": 64, "chunks_only": True},
    "e5m2-everything": {"kv_dtype": E5M2, "window": 100, "sinks": True, "cap": 30.0},
}
CASES = [("tpu-v6e", variant) for variant in VARIANTS] + [
    (target, variant)
    for target in ("tpu-v5e", "tpu-v7")
    for variant in (
        "decode",
        "dim-128-everything",
        "dim-192-window-cap",
        "dim-256-window-cap",
        "dim-512",
        "fp8-everything",
        "latent-decode",
        "latent",
        "latent-fp8",
        "latent-heads-16",
        "latent-few-queries",
    )
]


QUICK = {
    "tpu-v6e": ("decode", "reuses", "dim-64", "dim-128-everything", "fp8-everything", "latent"),
    "tpu-v5e": ("dim-128-everything",),
    "tpu-v7": ("dim-128-everything", "latent-fp8"),
}


@pytest.mark.parametrize(("target", "variant"), grid(CASES, lambda case: case[1] in QUICK[case[0]]))
def test_a_variant_compiles_and_leaves_the_pool_in_place(
    target: str, variant: str, report: Callable[[Row], None]
) -> None:
    start = time.monotonic()
    mesh = target_mesh(target, data=TARGETS[target])
    compiled = compile_attention(mesh, "mosaic_tpu", max_pages=MAX_PAGES, **VARIANTS[variant])
    memory = compiled.memory_analysis()
    seconds = time.monotonic() - start
    text = compiled.as_text()
    kernels, _ = own_kernels_of(compiled, instructions(text))
    report(Row(target, "mosaic_tpu", variant, seconds, memory.temp_size_in_bytes, memory.alias_size_in_bytes, kernels))

    assert all(one.vmem_bytes is not None for one in kernels)
    assert memory.alias_size_in_bytes > 0.99 * POOL_BYTES
    # The queries and outputs of many heads over latent rows are large themselves.
    large = 4 if "value_dim" in VARIANTS[variant] else 1
    assert memory.temp_size_in_bytes < large * 2**26
    calls = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    assert len(calls) == (3 if "reuses" in VARIANTS[variant] else 1)
    assert all("paged_attention_tpu" in call for call in calls)
    assert not {"copy", "transpose", "scatter"} & {
        one.opcode for one in instructions(text) if one.elements > large * 2**24
    }
