"""Mosaic GPU's grouped products compile for an H200 without one: in registers, with no copy of the weights."""

from __future__ import annotations

import dataclasses
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
from pallas_kernels.grouped_matmul import Gate, Groups, grouped_matmul
from pallas_kernels.quantized_matmul import Backend, QuantizedWeight, Scheme, make_weight
from pallas_kernels.target import target_of
from tests.aot.conftest import Row
from tests.aot.kernels import checked_kernels
from tests.selection import grid

pytestmark = pytest.mark.aot

SCHEMES = {
    "bf16": None,
    "int4": Scheme("int4", 128),
    "int4-zeros-group-32": Scheme("int4", 32, zeros=True),
    "int8": Scheme("int8", 128),
    "int8-channel": Scheme("int8"),
    "int8-token": Scheme("int8", activations="token"),
    "fp4": Scheme("fp4", 32),
    "fp8-channel": Scheme("fp8"),
    "fp8-token": Scheme("fp8", activations="token"),
    "fp8-static": Scheme("fp8", activations="static"),
    "fp8-blocks": Scheme("fp8", 128, activations="group"),
}
SWIGLU, CLAMPED = Gate(), Gate(slope=1.702, limit=7.0, up_offset=1.0)


@dataclasses.dataclass(frozen=True)
class Layer:
    """The experts of a layer: inputs of the gate and up matrices, and of the down matrix."""

    dim: int
    ffn: int
    experts: int
    choices: int
    gate: Gate
    bias: bool


LAYERS = {
    "qwen3-30b": Layer(2048, 768, 128, 8, SWIGLU, bias=False),
    "gpt-oss-120b": Layer(2880, 2880, 128, 4, CLAMPED, bias=True),
}
TOKENS = (1, 16, 64, 256, 2048)


@dataclasses.dataclass(frozen=True)
class Product:
    """The product of gate and up, or of down, of `tokens`."""

    layer: str
    scheme: str
    up: bool
    tokens: int

    def __str__(self) -> str:
        return f"{self.layer}-{self.scheme}-{'up' if self.up else 'down'}-{self.tokens}"

    @property
    def shape(self) -> tuple[int, int, int]:
        """That of the weight."""
        layer = LAYERS[self.layer]
        return (layer.experts, *((2 * layer.ffn, layer.dim) if self.up else (layer.dim, layer.ffn)))


PRODUCTS = [
    Product(layer, scheme, up, tokens)
    for layer, schemes in (("qwen3-30b", SCHEMES), ("gpt-oss-120b", ("bf16", "fp4")))
    for scheme in schemes
    for up in (True, False)
    for tokens in TOKENS
]
QUICK = {
    Product("qwen3-30b", "bf16", True, 2048),
    Product("qwen3-30b", "int4", True, 1),
    Product("gpt-oss-120b", "fp4", True, 64),
    Product("qwen3-30b", "fp8-blocks", False, 2048),
}


@pytest.mark.parametrize("product", grid(PRODUCTS, QUICK.__contains__), ids=str)
def test_a_product_compiles_without_spills_and_reads_the_weights_where_they_are(
    product: Product, report: Callable[[Row], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    start = time.monotonic()
    compiled = compile_product(product)
    memory = compiled.memory_analysis()
    seconds = time.monotonic() - start
    kernels = checked_kernels(compiled, "nvidia-h200")
    sizes = memory.temp_size_in_bytes, memory.alias_size_in_bytes
    report(Row("nvidia-h200", "mosaic_gpu", str(product), seconds, *sizes, kernels))

    assert [(one.kernel, one.calls) for one in kernels] == [("grouped_matmul (mosaic gpu)", 1)]
    layer = LAYERS[product.layer]
    rows = product.tokens * layer.choices
    # No more than the rows of inputs, their factors, and those as numbers.
    assert memory.temp_size_in_bytes < 4 * rows * product.shape[2] + 2**20
    assert not re.search(
        rf"\w+\[{layer.experts * product.shape[1]},\d+\]\S* (?:copy|fusion|transpose|convert)\(",
        compiled.as_text() or "",
    )
    for path in tmp_path.glob("*.ptx"):
        assert "wgmma.mma_async" in path.read_text()
    for path in tmp_path.glob("*.ptxas"):
        assembled = path.read_text()
        assert "wgmma.mma_async instructions are serialized" not in assembled
        assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", assembled) == [("0", "0")]


def compile_product(product: Product) -> jax.stages.Compiled:
    """Return the compiled product of one device."""
    mesh = target_mesh("nvidia-h200")
    target = target_of(mesh.devices.flat[0])
    backend = Backend("mosaic_gpu", target)
    layer, scheme, shape = LAYERS[product.layer], SCHEMES[product.scheme], product.shape
    gate = layer.gate if product.up else None
    rows = product.tokens * layer.choices

    def struct(shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def run(x: jax.Array, weight: Any, groups: Groups, bias: Any) -> jax.Array:
        if isinstance(weight, QuantizedWeight):
            weight = weight.reshape(*shape)
        options: dict[str, Any] = {"bias": bias, "gate": gate, "of_tokens": product.up}
        return grouped_matmul(x, weight, groups, out_dtype=jnp.bfloat16, target=target, backend=backend, **options)

    weight: Any = struct(shape, jnp.bfloat16)
    if scheme is not None:
        weight = make_weight((shape[0] * shape[1], shape[2]), scheme, backend, struct)
    groups = Groups(
        struct((layer.experts + 1,), jnp.int32),
        struct((rows,), jnp.int32),
        struct((product.tokens, layer.choices), jnp.int32),
    )
    bias = struct(shape[:2], jnp.bfloat16) if layer.bias else None
    x = struct((product.tokens if product.up else rows, shape[2]), jnp.bfloat16)
    sharded = jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(sharded).lower(x, weight, groups, bias).compile()
