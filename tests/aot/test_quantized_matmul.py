"""Products with quantized weights compile for devices that aren't here, and no converted copy of a weight is in memory.

The weight is that of an MLP of Llama-3.1-8B.
"""

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
from jaxserve.runtime.programs.hlo import instructions
from jaxserve.runtime.programs.inspection import own_kernels_of
from pallas_kernels.dispatch import BackendName
from pallas_kernels.quantized_matmul import (
    Backend,
    QuantizedWeight,
    Scheme,
    make_weight,
    quantized_matmul,
)
from pallas_kernels.quantized_matmul.backends import BACKENDS
from pallas_kernels.target import target_of
from tests.aot.conftest import Row
from tests.aot.kernels import checked_kernels
from tests.selection import grid

pytestmark = pytest.mark.aot

OUT, IN = 14336, 4096
GPUS = ("nvidia-h200", "nvidia-l4", "nvidia-a100-80", "nvidia-b200")
ROWS = (1, 16, 64, 2048)

TRITON = {
    "int4": Scheme("int4", 128),
    "int4-zeros": Scheme("int4", 128, zeros=True),
    "int4-64": Scheme("int4", 64),
    "int4-32-zeros": Scheme("int4", 32, zeros=True),
    "int4-channel": Scheme("int4"),
    "int8": Scheme("int8", 128),
    "int8-32-zeros": Scheme("int8", 32, zeros=True),
    "int8-16": Scheme("int8", 16),
    "int8-channel": Scheme("int8"),
    "fp4": Scheme("fp4", 32),
    "fp8": Scheme("fp8", 128),
    "fp8-channel": Scheme("fp8"),
    "fp8-blocks": Scheme("fp8", 128, activations="group"),
}
TRITON_CASES = [
    *itertools.product(GPUS, TRITON, ROWS, ("bfloat16",)),
    *itertools.product(GPUS, ("int4-zeros", "fp8"), ROWS, ("float16", "float32")),
]
QUICK_TRITON = {
    ("nvidia-h200", "int4", 64, "bfloat16"),
    ("nvidia-l4", "fp8-blocks", 2048, "bfloat16"),
    ("nvidia-a100-80", "int4-zeros", 1, "bfloat16"),
    ("nvidia-h200", "fp4", 2048, "bfloat16"),
    ("nvidia-a100-80", "int8", 2048, "bfloat16"),
}
XLA = {
    "int8": Scheme("int8"),
    "int8-zeros": Scheme("int8", zeros=True),
    "int8-token": Scheme("int8", activations="token"),
    "fp8": Scheme("fp8"),
    "fp8-token": Scheme("fp8", activations="token"),
    "fp8-static": Scheme("fp8", activations="static"),
}
TPUS = {"tpu-v5e": 1, "tpu-v6e": 1, "tpu-v7": 2}
ON_TPUS = {name: TRITON[name] for name in ("int4", "int4-32-zeros", "int4-channel", "int8", "int8-16")}
QUICK_TPUS = {("tpu-v5e", "int4", 64), ("tpu-v6e", "int4-32-zeros", 2048), ("tpu-v7", "int8", 1)}
QUICK_XLA = {
    ("nvidia-h200", "fp8-token", 1),
    ("nvidia-h200", "int8-token", 64),
    ("nvidia-l4", "fp8-static", 2048),
    ("nvidia-a100-80", "int8-token", 16),
    ("tpu-v5e", "int8", 1),
    ("tpu-v6e", "fp8-token", 64),
}


def compiled_product(
    mesh: Mesh, backend: BackendName, scheme: Scheme, rows: int, *, dtype: str = "bfloat16", options: Any = None
) -> Any:
    """Return the compiled product with a weight `[OUT, IN]`; assert that the backend takes it."""
    target = target_of(mesh.devices.flat[0])
    assert BACKENDS.refusal(backend, target, (OUT, IN, scheme)) is None

    def struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    weight = make_weight((OUT, IN), scheme, Backend(backend, target), struct)

    def product(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
        return quantized_matmul(x, weight, out_dtype=x.dtype)

    sharded = jax.shard_map(product, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(sharded).lower(struct((rows, IN), jnp.dtype(dtype)), weight).compile(options)


def assert_no_copy(compiled: Any, scheme: Scheme, rows: int) -> int:
    """Assert that nothing as large as a weight of 16 bits is in memory besides inputs and two outputs in float32."""
    temp: int = compiled.memory_analysis().temp_size_in_bytes
    assert temp < OUT * IN + 2 * 4 * rows * OUT, (scheme, rows)
    return temp


@pytest.mark.parametrize(
    ("target", "variant", "rows", "dtype"),
    grid(TRITON_CASES, QUICK_TRITON.__contains__),
)
def test_triton_multiplies_without_spills(
    target: str, variant: str, rows: int, dtype: str, report: Callable[[Row], None]
) -> None:
    start = time.monotonic()
    compiled = compiled_product(target_mesh(target), "triton", TRITON[variant], rows, dtype=dtype)
    seconds = time.monotonic() - start
    kernels = checked_kernels(compiled, target)
    temp = assert_no_copy(compiled, TRITON[variant], 3 * rows if dtype == "float32" else rows)
    report(Row(target, "triton", f"{variant}-{rows}-rows", seconds, temp, 0, kernels))
    assert [one.kernel for one in kernels] == ["quantized_matmul (triton)"]


ON_XLA = [
    (target, variant, rows)
    for target, variant, rows in itertools.product((*GPUS, *TPUS), XLA, ROWS)
    if target in TPUS or XLA[variant].activations is not None
]


@pytest.mark.parametrize(("target", "variant", "rows"), grid(ON_XLA, QUICK_XLA.__contains__))
def test_xla_multiplies_numbers_of_8_bits(target: str, variant: str, rows: int, report: Callable[[Row], None]) -> None:
    mesh, scheme = target_mesh(target, data=TPUS.get(target, 1)), XLA[variant]
    if target == "nvidia-a100-80" and scheme.numbers == "fp8":
        refusal = BACKENDS.refusal("xla", target_of(mesh.devices.flat[0]), (OUT, IN, scheme))
        assert refusal is not None
        assert "compute capability 8.9" in refusal
        return
    start = time.monotonic()
    compiled = compiled_product(mesh, "xla", scheme, rows)
    seconds = time.monotonic() - start
    report(Row(target, "xla", f"{variant}-{rows}-rows", seconds, assert_no_copy(compiled, scheme, rows), 0))


@pytest.mark.parametrize(
    ("target", "variant", "rows"), grid(itertools.product(TPUS, ON_TPUS, ROWS), QUICK_TPUS.__contains__)
)
def test_a_tpu_multiplies_groups(target: str, variant: str, rows: int, report: Callable[[Row], None]) -> None:
    start = time.monotonic()
    compiled = compiled_product(target_mesh(target, data=TPUS[target]), "mosaic_tpu", ON_TPUS[variant], rows)
    seconds = time.monotonic() - start
    text = compiled.as_text()
    kernels, _ = own_kernels_of(compiled, instructions(text))
    temp = assert_no_copy(compiled, ON_TPUS[variant], rows)
    report(Row(target, "mosaic_tpu", f"{variant}-{rows}-rows", seconds, temp, 0, kernels))
    [call] = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    assert "quantized_matmul_tpu" in call


@pytest.mark.parametrize("rows", grid(ROWS, (1).__eq__))
@pytest.mark.parametrize(
    ("variant", "call"), [("fp8-token", "__cublas$lt$matmul$f8"), ("int8-token", "__cublas$lt$matmul")]
)
def test_products_of_quantized_inputs_can_be_cublas_calls(variant: str, call: str, rows: int) -> None:
    """With a device, XLA times this call and kernels of its own, and takes the fastest; without one, it takes those."""
    options = {"xla_gpu_enable_triton_gemm": False}
    compiled = compiled_product(target_mesh("nvidia-h200"), "xla", XLA[variant], rows, options=options)
    [line] = [line for line in compiled.as_text().splitlines() if f'custom_call_target="{call}"' in line]
    # With the default precision, XLA lets cuBLASLt sum products of fp8 in fewer bits than float32 has.
    assert ('"operand_precision":["HIGHEST","HIGHEST"]' in line) == (variant == "fp8-token")
    assert_no_copy(compiled, XLA[variant], rows)
