"""Attention within packed texts compiles for GPUs and TPUs that aren't here, as one kernel that spills nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.runtime.devices.topology import target_mesh
from jaxserve.runtime.programs.hlo import instructions
from jaxserve.runtime.programs.inspection import own_kernels_of
from pallas_kernels.packed_attention import (
    PackedOptions,
    PackedProblem,
    Texts,
    choose_packed_backend,
    packed_attention,
)
from pallas_kernels.target import target_of
from tests.aot.conftest import Row
from tests.aot.kernels import checked_kernels
from tests.aot.test_triton import REFUSE_SPILLS
from tests.selection import grid

pytestmark = pytest.mark.aot

TOKENS, TEXTS = 4096, 256
GPUS, TPUS = ("nvidia-h200", "nvidia-a100-80", "nvidia-l4", "nvidia-b200"), ("tpu-v5e", "tpu-v6e")
VARIANTS: dict[str, dict[str, Any]] = {
    "minilm": {"heads": 12, "kv_heads": 12, "head_dim": 32},
    "modernbert": {"heads": 12, "kv_heads": 12, "head_dim": 64, "reach": 64},
    "mpnet": {"heads": 12, "kv_heads": 12, "head_dim": 64, "far": 128},
    "gemma": {"heads": 3, "kv_heads": 1, "head_dim": 256, "reach": 256},
    "dim-96-cap": {"heads": 8, "kv_heads": 2, "head_dim": 96, "cap": 30.0},
    "float32": {"heads": 12, "kv_heads": 12, "head_dim": 64, "dtype": "float32"},
    "float32-dim-256-everything": {
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 256,
        "dtype": "float32",
        "reach": 100,
        "cap": 30.0,
        "far": 128,
    },
}


def compile_packed(
    mesh: Mesh,
    name: str,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str = "bfloat16",
    reach: int | None = None,
    cap: float | None = None,
    far: int | None = None,
    options: Any = None,
) -> Any:
    """Return the compiled attention of `TOKENS` tokens."""
    problem = PackedProblem(heads, kv_heads, head_dim, jnp.dtype(dtype), has_bias=far is not None)
    backend = choose_packed_backend(target_of(mesh.devices.flat[0]), problem, name)

    def struct(*shape: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def attention(q: Any, k: Any, v: Any, texts: Texts, bias: Any) -> Any:
        return packed_attention(q, k, v, texts, PackedOptions(head_dim**-0.5, reach, cap, bias), backend)

    kv = struct(TOKENS, kv_heads, head_dim, dtype=problem.dtype)
    sharded = jax.shard_map(attention, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(sharded).lower(
            struct(TOKENS, heads, head_dim, dtype=problem.dtype),
            kv,
            kv,
            Texts(struct(TEXTS + 1), struct()),
            None if far is None else struct(heads, 2 * far + 1, dtype=np.float32),
        )
    return lowered.compile(options)


QUICK = {
    "nvidia-h200": ("minilm", "mpnet", "gemma"),
    "nvidia-l4": ("modernbert", "float32-dim-256-everything"),
    "nvidia-b200": ("dim-96-cap",),
}


@pytest.mark.parametrize(
    ("target", "variant"),
    grid(itertools.product(GPUS, VARIANTS), lambda case: case[1] in QUICK.get(case[0], ())),
)
def test_tritons_kernel_spills_nothing(target: str, variant: str, report: Callable[[Row], None]) -> None:
    start = time.monotonic()
    compiled = compile_packed(target_mesh(target), "triton", **VARIANTS[variant], options=REFUSE_SPILLS)
    memory, seconds = compiled.memory_analysis(), time.monotonic() - start
    kernels = checked_kernels(compiled, target)
    report(Row(target, variant, "packed attention", seconds, memory.temp_size_in_bytes, 0, kernels))
    assert [one.kernel for one in kernels] == ["packed_attention (triton)"]
    assert memory.temp_size_in_bytes < 2**20


ON_TPUS = [name for name, variant in VARIANTS.items() if "far" not in variant]


@pytest.mark.parametrize(
    ("target", "variant"),
    grid(itertools.product(TPUS, ON_TPUS), lambda case: case in (("tpu-v6e", "minilm"), ("tpu-v5e", "gemma"))),
)
def test_a_tpus_kernel_compiles(target: str, variant: str, report: Callable[[Row], None]) -> None:
    start = time.monotonic()
    compiled = compile_packed(target_mesh(target), "mosaic_tpu", **VARIANTS[variant])
    memory, seconds = compiled.memory_analysis(), time.monotonic() - start
    kernels, _ = own_kernels_of(compiled, instructions(compiled.as_text()))
    report(Row(target, variant, "packed attention", seconds, memory.temp_size_in_bytes, 0, kernels))
    assert [one.kernel for one in kernels] == ["packed_attention_tpu (mosaic tpu)"]
