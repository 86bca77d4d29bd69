"""Mosaic GPU's quantized products compile for an H200 without one: in registers, with no copy of the weight."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.runtime.devices.topology import target_mesh
from pallas_kernels.quantized_matmul import (
    Backend,
    QuantizedWeight,
    Scheme,
    make_weight,
    numbers_shape,
    quantized_matmul,
)
from pallas_kernels.target import target_of
from tests.aot.conftest import Row
from tests.aot.kernels import checked_kernels
from tests.selection import grid

pytestmark = pytest.mark.aot

SCHEMES = {
    "int4": Scheme("int4", 128),
    "int4-zeros": Scheme("int4", 128, zeros=True),
    "int4-zeros-group-32": Scheme("int4", 32, zeros=True),
    "int4-group-64": Scheme("int4", 64),
    "int4-channel": Scheme("int4"),
    "int8": Scheme("int8", 128),
    "int8-zeros-group-32": Scheme("int8", 32, zeros=True),
    "int8-channel": Scheme("int8"),
    "fp4-group-32": Scheme("fp4", 32),
    "fp8-channel": Scheme("fp8"),
    "int8-token": Scheme("int8", activations="token"),
    "fp8": Scheme("fp8", 128),
    "fp8-blocks": Scheme("fp8", 128, activations="group"),
}
# Products of Llama-3.1-8B: of attention's output, of queries with keys and values, and of the two of the MLP.
SHAPES = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336))
ROWS = (1, 16, 64, 128, 2048)


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of `rows` with a weight `shape`."""

    scheme: str
    shape: tuple[int, int]
    rows: int

    def __str__(self) -> str:
        return f"{self.scheme}-{'x'.join(map(str, self.shape))}-{self.rows}"


PRODUCTS = [Product(scheme, shape, rows) for scheme in SCHEMES for shape in SHAPES for rows in ROWS]
QUICK = {
    Product("int4", (4096, 4096), 1),
    Product("int4-zeros", (6144, 4096), 64),
    Product("int4", (28672, 4096), 2048),
    Product("fp8-blocks", (4096, 14336), 2048),
}


@pytest.mark.parametrize("product", grid(PRODUCTS, QUICK.__contains__), ids=str)
def test_a_product_compiles_without_spills_and_reads_the_weight_where_it_is(
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

    assert [(one.kernel, one.calls) for one in kernels] == [("quantized_matmul (mosaic gpu)", 1)]
    (out_dim, in_dim), (stored, _) = product.shape, numbers_shape(product.shape, SCHEMES[product.scheme])
    assert memory.temp_size_in_bytes < 0.5 * np.prod(stored) + 4 * 3 * product.rows * (out_dim + in_dim)
    copy = rf"\w+\[{out_dim},(?:{in_dim}|{stored[1]}|{stored[1] // 4})\]\S* (?:copy|fusion|transpose|convert)\("
    assert not re.search(copy, compiled.as_text() or "")
    for path in tmp_path.glob("*.ptx"):
        assert "wgmma.mma_async" in path.read_text()
    for path in tmp_path.glob("*.ptxas"):
        assembled = path.read_text()
        assert "wgmma.mma_async instructions are serialized" not in assembled
        assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", assembled) == [("0", "0")]


def compile_product(product: Product) -> jax.stages.Compiled:
    """Return the compiled product of one device."""
    mesh = target_mesh("nvidia-h200")
    scheme = SCHEMES[product.scheme]

    def struct(shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    weight = make_weight(product.shape, scheme, Backend("mosaic_gpu", target_of(mesh.devices.flat[0])), struct)

    def run(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
        return quantized_matmul(x, weight, out_dtype=jnp.bfloat16)

    sharded = jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(sharded).lower(struct((product.rows, product.shape[1]), jnp.bfloat16), weight).compile()
