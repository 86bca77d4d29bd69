"""Triton's kernels for latent rows compile for GPUs without one: no spills, as many programs at once as they count on.

The heads are those of DeepSeek-V3 with data-parallel attention (128), Kimi-K2 (64), and DeepSeek-V2-Lite or
DeepSeek-V3 on eight devices (16). The pool is updated in place.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.runtime.devices.topology import target_mesh
from jaxserve.runtime.programs.hlo import instructions
from pallas_kernels.paged_attention import AttentionOptions, Backend, PagedKV, Problem, Rows, kv_layout, target_of
from pallas_kernels.paged_attention.arguments import LatentPreparation
from pallas_kernels.paged_attention.triton import backend, block_sizes
from tests.aot.conftest import Row
from tests.aot.kernels import E5M2, FP8, POOL_BYTES, checked_kernels, compile_attention
from tests.aot.test_triton import REFUSE_SPILLS, fitting_programs
from tests.selection import grid

pytestmark = pytest.mark.aot

ROWS = {"kv_heads": 1, "head_dim": 576, "value_dim": 512, "page_size": 64}
TARGETS = ("nvidia-h200", "nvidia-a100-80", "nvidia-l4", "nvidia-b200")
VARIANTS: dict[str, dict[str, Any]] = {
    "heads-128": {"heads": 128},
    "heads-128-fp8": {"heads": 128, "kv_dtype": FP8},
    "heads-128-e5m2": {"heads": 128, "kv_dtype": E5M2},
    "heads-64-decode": {"heads": 64, "decode_only": True},
    "heads-16": {"heads": 16},
    "heads-16-fp8": {"heads": 16, "kv_dtype": FP8},
    "heads-16-e5m2": {"heads": 16, "kv_dtype": E5M2},
    "heads-16-few-queries": {"heads": 16, "max_queries": 5},
    "heads-20-chunks-only": {"heads": 20, "chunks_only": True},
    "heads-16-float32": {"heads": 16, "dtype": "float32"},
    "expanded-chunks-only": {
        "heads": 16,
        "kv_heads": 16,
        "head_dim": 192,
        "value_dim": None,
        "chunks_only": True,
    },
}
QUICK = {
    "nvidia-h200": ("heads-128", "heads-128-fp8", "heads-16", "expanded-chunks-only"),
    "nvidia-a100-80": ("heads-128", "heads-16-e5m2"),
    "nvidia-l4": ("heads-128", "heads-16-fp8"),
    "nvidia-b200": ("heads-128-fp8",),
}
CASES = grid(itertools.product(TARGETS, VARIANTS), lambda case: case[1] in QUICK[case[0]])


@pytest.mark.parametrize(("target", "variant"), CASES)
def test_a_variant_compiles_without_spills(target: str, variant: str, report: Callable[[Row], None]) -> None:
    mesh, options = target_mesh(target), {**ROWS, **VARIANTS[variant]}
    if target == "nvidia-a100-80" and options.get("kv_dtype") == FP8:
        with pytest.raises(ValueError, match=r"float8_e4m3fn needs compute capability 8\.9 .* not NVIDIA A100"):
            compile_attention(mesh, "triton", **options)
        return
    start = time.monotonic()
    compiled = compile_attention(mesh, "triton", compiler_options=REFUSE_SPILLS, **options)
    memory = compiled.memory_analysis()
    seconds = time.monotonic() - start
    kernels = checked_kernels(compiled, target)
    report(Row(target, "latent", variant, seconds, memory.temp_size_in_bytes, memory.alias_size_in_bytes, kernels))

    assert memory.alias_size_in_bytes > 0.99 * POOL_BYTES
    assert "scatter" not in {one.opcode for one in instructions(compiled.as_text())}
    names = {"write"} | (set() if options.get("chunks_only") else {"decode"})
    names |= set() if {"decode_only", "max_queries"} & set(options) else {"prefill"}
    assert {one.kernel for one in kernels} == {f"paged_attention_{name} (triton)" for name in names}
    dtype = np.dtype(jnp.dtype(options.get("dtype", "bfloat16")))
    kv_dtype = np.dtype(jnp.dtype(options.get("kv_dtype", dtype)))
    sizes = (options[name] for name in ("heads", "kv_heads", "head_dim", "page_size"))
    problem, device = Problem(*sizes, dtype, kv_dtype, options["value_dim"]), target_of(mesh.devices.flat[0])
    wanted = {
        "decode": block_sizes.decode_blocks_for(
            problem, device, rows=64, queries=options.get("max_queries", 1)
        ).programs,
        "prefill": block_sizes.prefill_blocks_for(problem, device).programs,
    }
    for one, name in itertools.product(kernels, wanted):
        if one.kernel == f"paged_attention_{name} (triton)":
            assert wanted[name] <= fitting_programs(one, target), one


@functools.cache
def latent_layers(layers: int) -> Any:
    """Return compiled decodes of some layers, each of which takes the raw products of the projections."""
    mesh = target_mesh("nvidia-h200")
    chosen = Backend("triton", target_of(mesh.devices.flat[0]))
    heads, rows, page_size = 128, 64, 64
    layout = kv_layout(
        num_layers=layers, num_pages=2048, page_size=page_size, num_kv_heads=1, head_dim=576,
        dtype=np.dtype(jnp.bfloat16), platform="cuda", value_dim=512,
    )  # fmt: skip

    def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def decode(kv: PagedKV, norm: jax.Array, cos: jax.Array, sin: jax.Array, products: Any, *where: jax.Array) -> Any:
        of_rows, outputs = Rows(*where, decode_only=True), []
        then, options = LatentPreparation(1e-6, norm, (cos, sin)), AttentionOptions(0.07)
        for layer, new in enumerate(products):
            out, kv = backend.latent_attention(*new, then, kv, layer, of_rows, options, chosen)
            outputs.append(out)
        return outputs, kv

    products = [(struct(rows, heads, 512), struct(rows, heads, 192), struct(rows, 1536 + 576)) for _ in range(layers)]
    angles = struct(rows, 32, dtype=np.float32)
    integers = [struct(*shape, dtype=np.int32) for shape in ((rows, 128), (rows + 1,), (rows,), (), ())]
    pool = layout.paged_kv(*(struct(*shape) for shape in (layout.shape, layout.values_shape)))
    sharded = jax.shard_map(decode, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(sharded, donate_argnums=0).lower(pool, struct(512), angles, angles, products, *integers)
    return lowered.compile(REFUSE_SPILLS)


def test_a_layer_of_raw_products_launches_two_kernels(report: Callable[[Row], None]) -> None:
    few, many = (latent_layers(layers) for layers in (1, 2))
    kernels = checked_kernels(many, "nvidia-h200")
    assert sorted((one.kernel, one.calls) for one in kernels) == [
        ("paged_attention_decode (triton)", 2),
        ("paged_attention_write_latent (triton)", 2),
    ]

    def launches(compiled: Any) -> int:
        opcodes = ("fusion", "custom-call", "copy", "dynamic-update-slice")
        return sum(one.opcode in opcodes for one in instructions(compiled.as_text()))

    assert launches(many) - launches(few) == 2
