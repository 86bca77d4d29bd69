"""Mixtures of experts compile for GPUs that aren't here: no spills, no copy of a weight, and few launches."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.runtime.devices.topology import target_mesh
from jaxserve.runtime.programs.builder import compiler_options
from jaxserve.runtime.programs.cost import program_cost
from jaxserve.runtime.programs.hlo import HloModule, Tables
from pallas_kernels.expert_routing import Routing, choose_experts, group_by_expert
from pallas_kernels.grouped_matmul import Gate, Groups, grouped_matmul
from pallas_kernels.quantized_matmul import Backend, Scheme, make_weight
from pallas_kernels.target import target_of
from tests.aot.conftest import Row
from tests.aot.kernels import checked_kernels
from tests.selection import grid

pytestmark = pytest.mark.aot

GPUS = ("nvidia-h200", "nvidia-l4", "nvidia-a100-80", "nvidia-b200")
# Experts, inputs, outputs of gate, choices: Qwen3-30B-A3B, Mixtral-8x7B, gpt-oss-120b.
QWEN, MIXTRAL, GPT_OSS = (128, 2048, 768, 8), (8, 4096, 14336, 2), (128, 2880, 2880, 4)
TOKENS = (1, 8, 64, 2048)
VARIANTS: dict[str, tuple[Scheme | None, tuple[int, int, int, int]]] = {
    "bf16": (None, QWEN),
    "bf16-mixtral": (None, MIXTRAL),
    "fp4-gpt-oss": (Scheme("fp4", 32), GPT_OSS),
    "int4": (Scheme("int4", 128), QWEN),
    "int4-zeros": (Scheme("int4", 128, zeros=True), MIXTRAL),
    "int4-32-zeros": (Scheme("int4", 32, zeros=True), QWEN),
    "int8": (Scheme("int8", 128), QWEN),
    "int8-32-zeros": (Scheme("int8", 32, zeros=True), QWEN),
    "int8-16": (Scheme("int8", 16), QWEN),
    "int8-channel": (Scheme("int8"), QWEN),
    "int8-token": (Scheme("int8", activations="token"), QWEN),
    "fp8-channel": (Scheme("fp8"), QWEN),
    "fp8-token": (Scheme("fp8", activations="token"), QWEN),
    "fp8-static": (Scheme("fp8", activations="static"), QWEN),
    "fp8-blocks": (Scheme("fp8", 128, activations="group"), QWEN),
}


def structs(mesh: Mesh) -> Callable[[tuple[int, ...], Any], jax.ShapeDtypeStruct]:
    sharding = NamedSharding(mesh, PartitionSpec())
    return lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def weight_struct(mesh: Mesh, shape: tuple[int, int, int], scheme: Scheme | None) -> Any:
    """Return experts as the Triton backend stores them."""
    struct = structs(mesh)
    if scheme is None:
        return struct(shape, jnp.bfloat16)
    backend = Backend("triton", target_of(mesh.devices.flat[0]))
    flat = make_weight((shape[0] * shape[1], shape[2]), scheme, backend, jax.ShapeDtypeStruct)
    return jax.tree.map(lambda x: struct(x.shape if x.ndim == 1 else (*shape[:2], x.shape[1]), x.dtype), flat)


def compiled(mesh: Mesh, function: Any, *arguments: Any) -> Any:
    sharded = jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(sharded).lower(*arguments).compile(compiler_options(mesh, 1))


def compiled_product(mesh: Mesh, variant: str, tokens: int, *, up: bool, dtype: Any = jnp.bfloat16) -> Any:
    """Return the product of tokens with gate and up, or of rows with down; with a bias."""
    scheme, (experts, dim, ffn, choices) = VARIANTS[variant]
    out, inputs, rows = (2 * ffn, dim, tokens) if up else (dim, ffn, tokens * choices)
    backend, struct = Backend("triton", target_of(mesh.devices.flat[0])), structs(mesh)

    def product(x: jax.Array, weight: Any, bias: jax.Array, groups: Groups) -> jax.Array:
        options: dict[str, Any] = {"gate": Gate() if up else None, "of_tokens": up, "out_dtype": x.dtype}
        return grouped_matmul(x, weight, groups, bias=bias, target=backend.target, backend=backend, **options)

    pairs = tokens * choices
    shapes: list[Any] = [(experts + 1,), (pairs,), (tokens, choices)]
    groups = Groups(*(struct(shape, jnp.int32) for shape in shapes))
    weight = weight_struct(mesh, (experts, out, inputs), scheme)
    return compiled(mesh, product, struct((rows, inputs), dtype), weight, struct((experts, out), dtype), groups)


def compiled_layer(mesh: Mesh, variant: str, tokens: int, *, grouped: bool = False) -> Any:
    """Return the feed-forward block of a layer: norm, router, routing, experts, the sum of choices, the residual."""
    scheme, (experts, dim, ffn, choices) = VARIANTS[variant]
    target, struct = target_of(mesh.devices.flat[0]), structs(mesh)
    backend = Backend("triton", target)
    routing = Routing(choices, renormalize=True)
    if grouped:
        routing = Routing(choices, "sigmoid", renormalize=True, groups=8, groups_chosen=4)
    bf16 = jnp.bfloat16

    def layer(x: jax.Array, norm: jax.Array, router: jax.Array, correction: Any, up: Any, down: Any) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = (wide * jax.lax.rsqrt((wide * wide).mean(axis=1, keepdims=True) + 1e-6)).astype(bf16) * norm
        logits = jnp.dot(normed, router.T, preferred_element_type=jnp.float32)
        ids, weights = choose_experts(logits, correction, routing, target)
        groups = group_by_expert(ids, experts, target)
        options: dict[str, Any] = {"out_dtype": bf16, "one_pass": True, "target": target, "backend": backend}
        hidden = grouped_matmul(normed, up, groups, gate=Gate(), of_tokens=True, **options)
        out = grouped_matmul(hidden, down, groups, **options)
        there = (groups.places < len(out))[:, :, None]
        chosen = jnp.where(there, out.at[groups.places].get(mode="clip"), 0).astype(jnp.float32)
        return x + (chosen * weights[:, :, None]).sum(axis=1).astype(bf16)

    return compiled(
        mesh,
        layer,
        struct((tokens, dim), bf16),
        struct((dim,), bf16),
        struct((experts, dim), bf16),
        struct((experts,), jnp.float32) if grouped else None,
        weight_struct(mesh, (experts, 2 * ffn, dim), scheme),
        weight_struct(mesh, (experts, dim, ffn), scheme),
    )


QUICK = (
    ("nvidia-h200", "bf16", 8, True),
    ("nvidia-a100-80", "bf16-mixtral", 2048, True),
    ("nvidia-l4", "fp8-blocks", 64, True),
    ("nvidia-l4", "fp4-gpt-oss", 2048, False),
    ("nvidia-a100-80", "int4-zeros", 64, False),
)


@pytest.mark.parametrize(
    ("target", "variant", "tokens", "up"),
    grid(itertools.product(GPUS, VARIANTS, TOKENS, (True, False)), QUICK.__contains__),
)
def test_experts_are_multiplied_in_one_launch_without_spills(
    target: str, variant: str, tokens: int, up: bool, report: Callable[[Row], None]
) -> None:
    start = time.monotonic()
    made = compiled_product(target_mesh(target), variant, tokens, up=up)
    seconds = time.monotonic() - start
    kernels = checked_kernels(made, target)
    temp = made.memory_analysis().temp_size_in_bytes
    report(Row(target, variant, f"{'up' if up else 'down'}-{tokens}", seconds, temp, 0, kernels))
    assert [one.kernel for one in kernels] == ["grouped_matmul (triton)"]
    _, (_, dim, ffn, choices) = VARIANTS[variant]
    assert temp <= 4 * tokens * choices * max(dim, ffn) + 2**20, (
        "a copy of inputs in 8 bits, and their factors, no more"
    )


ROUTING = {
    "qwen": (128, Routing(8, renormalize=True), False),
    "qwen2": (60, Routing(4), False),
    "deepseek": (256, Routing(8, "sigmoid", renormalize=True, scale=2.5, groups=8, groups_chosen=4), True),
    "gpt-oss": (32, Routing(4, "softmax_of_chosen"), False),
    "ten-of-512": (512, Routing(10, renormalize=True), True),
}
ROUTING_CASES = list(itertools.product(GPUS, ROUTING, (1, 64, 8192)))


@pytest.mark.parametrize(
    ("target", "rules", "tokens"), grid(ROUTING_CASES, lambda one: one == ("nvidia-h200", "deepseek", 8192))
)
def test_routing_takes_two_launches_without_spills(target: str, rules: str, tokens: int) -> None:
    experts, routing, corrected = ROUTING[rules]
    mesh = target_mesh(target)
    device, struct = target_of(mesh.devices.flat[0]), structs(mesh)

    def route(logits: jax.Array, correction: jax.Array | None) -> Any:
        ids, weights = choose_experts(logits, correction, routing, device)
        return ids, weights, group_by_expert(ids, experts, device)

    correction = struct((experts,), jnp.float32) if corrected else None
    made = compiled(mesh, route, struct((tokens, experts), jnp.float32), correction)
    assert [one.kernel for one in checked_kernels(made, target)] == [
        "choose_experts (triton)",
        "group_by_expert (triton)",
    ]
    assert program_cost(HloModule(made.as_text()), Tables(), None).launches == 2


# The norm, the router's product, its choice, the rows of experts, two products, and the sum of choices; fp8 quantizes
# the inputs of both products. On smaller GPUs XLA computes which choices are there by itself.
LAUNCHES = {"bf16": 7, "fp8-blocks": 9, "fp8-token": 9, "int4": 7, "fp4-gpt-oss": 7}
MORE_LAUNCHES = {"nvidia-h200": 0, "nvidia-l4": 1}
LAYERS = list(itertools.product(MORE_LAUNCHES, LAUNCHES, (8, 64, 256)))
QUICK_LAYERS = (("nvidia-h200", "bf16", 8), ("nvidia-h200", "fp8-blocks", 64), ("nvidia-h200", "bf16", 256))


@pytest.mark.parametrize(("target", "variant", "tokens"), grid(LAYERS, QUICK_LAYERS.__contains__))
def test_a_layer_has_few_launches_and_no_copy_of_a_weight(target: str, variant: str, tokens: int) -> None:
    made = compiled_layer(target_mesh(target), variant, tokens, grouped=tokens == 256)
    checked_kernels(made, target)
    cost = program_cost(HloModule(made.as_text()), Tables(), None)
    most = LAUNCHES[variant] + MORE_LAUNCHES[target]
    assert cost.launches <= most, [(one.kernel, one.calls) for one in cost.kinds]
    _, (_, dim, ffn, choices) = VARIANTS[variant]
    # The rows of experts, between up and down and after, inputs, and what cuBLAS asks for; weights are larger.
    assert made.memory_analysis().temp_size_in_bytes <= 6 * tokens * choices * (dim + ffn) + 2**23
