"""The TPU kernel compiles for TPUs that aren't here, and leaves the pool in place: corners of the case table."""

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
from jaxserve.runtime.programs.inspection import instructions, own_kernels_of
from pallas_kernels.paged_attention import PagedKV, Problem, choose_backend, kv_layout, paged_attention, target_of
from tests.aot.conftest import Row

pytestmark = pytest.mark.aot

# Devices of the smallest topology there is of each.
TARGETS = {"tpu-v5e": 1, "tpu-v6e": 1, "tpu-v7": 2}
ROWS, TOKENS, LAYERS, MAX_PAGES = 64, 512, 2, 4096

# With heads outermost the stride from one to the next would be more than a TPU's copies take.
POOL_BYTES = 10 * 2**30

FP8 = "float8_e4m3fn"
VARIANTS: dict[str, dict[str, Any]] = {
    "decode": {"decode_only": True},
    "decode-fp8-dim-64": {"kv_dtype": FP8, "head_dim": 64, "decode_only": True},
    "dim-64": {"head_dim": 64, "heads": 9, "kv_heads": 3},
    "dim-80-mha-window": {"head_dim": 80, "heads": 32, "kv_heads": 32, "page_size": 32, "window": 100},
    "dim-96-sinks-cap": {"head_dim": 96, "heads": 14, "kv_heads": 2, "page_size": 64, "sinks": True, "cap": 30.0},
    "dim-128-everything": {"window": 1000, "sinks": True, "cap": 30.0},
    "dim-256-ratio-16": {"head_dim": 256, "heads": 16, "kv_heads": 1, "page_size": 128},
    "dim-256-mha": {"head_dim": 256, "heads": 16, "kv_heads": 16},
    "float32": {"dtype": "float32", "heads": 8, "kv_heads": 2},
    "fp8-everything": {"kv_dtype": FP8, "window": 100, "sinks": True, "cap": 30.0},
}
CASES = [("tpu-v6e", variant) for variant in VARIANTS] + [
    (target, variant)
    for target in ("tpu-v5e", "tpu-v7")
    for variant in ("decode", "dim-128-everything", "fp8-everything")
]


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
) -> tuple[Any, int]:
    """The compiled program, and bytes of its pool."""
    mesh = target_mesh(target, data=TARGETS[target])
    problem = Problem(heads, kv_heads, head_dim, page_size, jnp.dtype(dtype), jnp.dtype(kv_dtype or dtype))
    backend = choose_backend(target_of(mesh.devices.flat[0]), problem)
    assert backend.name == "mosaic_tpu"

    def struct(*shape: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def attention(kv: PagedKV, sinks: jax.Array | None, *arrays: jax.Array) -> Any:
        q, k, v, *rest = arrays
        options = {"window": window, "soft_cap": cap, "sinks": sinks, "decode_only": decode_only, "backend": backend}
        return paged_attention(q, k, v, kv, 1, *rest, scale=head_dim**-0.5, **options)

    sizes = {"num_layers": LAYERS, "page_size": page_size, "num_kv_heads": kv_heads, "head_dim": head_dim}
    page = kv_layout(**sizes, num_pages=1, dtype=problem.kv_dtype, platform="tpu").nbytes
    layout = kv_layout(**sizes, num_pages=POOL_BYTES // page, dtype=problem.kv_dtype, platform="tpu")
    pools = (struct(*shape, dtype=layout.dtype) for shape in (layout.shape, layout.values_shape))
    tokens = ROWS if decode_only else TOKENS
    new = struct(tokens, kv_heads, head_dim, dtype=problem.dtype)
    sharded = jax.shard_map(attention, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(sharded, donate_argnums=0).lower(
            layout.paged_kv(*pools, struct(2, LAYERS, kv_heads, dtype=np.float32) if kv_dtype else None),
            struct(heads, dtype=np.float32) if sinks else None,
            struct(tokens, heads, head_dim, dtype=problem.dtype),
            new,
            new,
            struct(ROWS, MAX_PAGES),
            struct(ROWS + 1),
            struct(ROWS),
            struct(),
            struct(),
        )
    return lowered.compile(), layout.nbytes


@pytest.mark.parametrize(("target", "variant"), CASES)
def test_a_variant_compiles_and_leaves_the_pool_in_place(
    target: str, variant: str, report: Callable[[Row], None]
) -> None:
    start = time.monotonic()
    compiled, pool_bytes = _compile(target, **VARIANTS[variant])
    memory = compiled.memory_analysis()
    seconds = time.monotonic() - start
    text = compiled.as_text()
    kernels, _ = own_kernels_of(compiled, instructions(text))
    report(Row(target, "mosaic_tpu", variant, seconds, memory.temp_size_in_bytes, memory.alias_size_in_bytes, kernels))

    assert [one.vmem_bytes is not None for one in kernels] == [True]
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 2**26
    [kernel] = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    assert "paged_attention_tpu" in kernel
    assert not {"copy", "transpose", "scatter"} & {one.opcode for one in instructions(text) if one.elements > 2**24}
