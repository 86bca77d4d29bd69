"""Grouped products compile for TPUs that aren't here, at the sizes of Qwen3-30B-A3B, without a copy of a weight."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.runtime.devices.topology import target_mesh
from jaxserve.runtime.programs.hlo import instructions
from jaxserve.runtime.programs.inspection import own_kernels_of
from pallas_kernels.expert_routing import group_by_expert
from pallas_kernels.grouped_matmul import BACKENDS, Gate, grouped_matmul
from pallas_kernels.quantized_matmul import Backend, Scheme, make_weight
from pallas_kernels.target import target_of
from tests.aot.conftest import Row
from tests.selection import grid

pytestmark = pytest.mark.aot

EXPERTS, CHOICES, DIM, FFN = 128, 8, 2048, 768
TPUS = {"tpu-v5e": 1, "tpu-v6e": 1, "tpu-v7": 2}
SCHEMES: dict[str, Scheme | None] = {
    "bf16": None,
    "int4": Scheme("int4", 128),
    "int4-32-zeros": Scheme("int4", 32, zeros=True),
    "int8": Scheme("int8", 128),
    "int8-channel": Scheme("int8"),
}
TOKENS = (1, 64, 2048)
QUICK = {("tpu-v5e", "bf16", 64), ("tpu-v6e", "bf16", 2048), ("tpu-v6e", "int4", 64), ("tpu-v5e", "int4-32-zeros", 1)}


def compiled_experts(mesh: Mesh, scheme: Scheme | None, tokens: int) -> Any:
    """Return the compiled products of a layer's experts, with biases, between routing and the sum of choices."""
    target = target_of(mesh.devices.flat[0])

    def struct(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def experts(outputs: int, inputs: int) -> Any:
        if scheme is None:
            assert BACKENDS.choose(target, (outputs, inputs, None)).name == "mosaic_tpu"
            return struct((EXPERTS, outputs, inputs))
        backend = Backend("mosaic_tpu", target)
        of_expert = make_weight((outputs, inputs), scheme, backend, struct)
        return jax.tree.map(lambda one: struct((EXPERTS, *one.shape), one.dtype), of_expert)

    def multiply(x: jax.Array, ids: jax.Array, bias: jax.Array, up: Any, down: Any) -> jax.Array:
        groups = group_by_expert(ids, EXPERTS, target)
        of_groups = functools.partial(grouped_matmul, groups=groups, out_dtype=x.dtype, target=target)
        return of_groups(of_groups(x, up, bias=bias, gate=Gate(), of_tokens=True), down)

    sharded = jax.shard_map(multiply, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    arguments = (
        struct((tokens, DIM)),
        struct((tokens, CHOICES), jnp.int32),
        struct((EXPERTS, 2 * FFN)),
        experts(2 * FFN, DIM),
        experts(DIM, FFN),
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(sharded).lower(*arguments).compile()


@pytest.mark.parametrize(
    ("target", "variant", "tokens"), grid(itertools.product(TPUS, SCHEMES, TOKENS), QUICK.__contains__)
)
def test_a_tpu_multiplies_the_experts_of_a_layer(
    target: str, variant: str, tokens: int, report: Callable[[Row], None]
) -> None:
    start = time.monotonic()
    compiled = compiled_experts(target_mesh(target, data=TPUS[target]), SCHEMES[variant], tokens)
    seconds = time.monotonic() - start
    text = compiled.as_text()
    kernels, _ = own_kernels_of(compiled, instructions(text))
    temp = compiled.memory_analysis().temp_size_in_bytes
    report(Row(target, "mosaic_tpu", f"experts-{variant}-{tokens}-tokens", seconds, temp, 0, kernels))
    calls = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    assert len(calls) == 2
    assert all("grouped_matmul_tpu" in call for call in calls)
    # Rows of inputs, and what the gate makes of them; nothing of the size of weights, or of scales of small groups
    rows = tokens * CHOICES
    assert temp < 8 * rows * (DIM + FFN) + 2**21, temp
    moved = {one.opcode for one in instructions(text) if one.elements > max(rows * DIM, 2**21)}
    assert not {"copy", "transpose", "convert", "fusion"} & moved
