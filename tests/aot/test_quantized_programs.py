"""Steps of quantized models compile for an H200: the intended kernels, no spills, no copy of a weight in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.runtime.devices.mesh import device_bytes
from jaxserve.runtime.programs.hlo import instructions
from jaxserve.runtime.programs.inspection import compile_and_inspect
from jaxserve.runtime.step.program import ProgramKey
from tests.aot.conftest import Row
from tests.aot.deployments import DECODE_ROWS, LLAMA_8B_TWO_LAYERS, MIXED_TOKENS, deployed
from tests.aot.deployments import target_mesh as mesh_of
from tests.selection import grid

pytestmark = pytest.mark.aot

DECODE, MIXED = ProgramKey("decode", DECODE_ROWS, True), ProgramKey("mixed", MIXED_TOKENS, False)
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
CUBLAS, TRITON = "cublas lt matmul f8", "quantized_matmul (triton)"
FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "fp8": (FP8, CUBLAS),
    "fp8 blocks": ({**FP8, "weight_block_size": [128, 128]}, TRITON),
    "awq": (AWQ, TRITON),
    "gptq, act-order": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, TRITON),
}
CASES = [(name, key) for name in FORMATS for key in (DECODE, MIXED)]
LAYERS = LLAMA_8B_TWO_LAYERS["num_hidden_layers"]
# Of a layer: its smallest weight in bfloat16.
OUTPUT_BYTES = 4096 * 4096 * 2


@pytest.mark.parametrize(
    ("name", "key"), grid(CASES, lambda case: case in (("fp8", DECODE), ("awq", DECODE), ("awq", MIXED))), ids=str
)
def test_a_step_multiplies_by_weights_as_they_are_stored(
    name: str, key: ProgramKey, report: Callable[[Row], None]
) -> None:
    quantization, kernel = FORMATS[name]
    made = deployed("nvidia-h200", {**LLAMA_8B_TWO_LAYERS, "quantization_config": quantization}, tensor=1)
    builder = made.builder(mesh_of("nvidia-h200", tensor=1, data=1))
    read, compiled = compile_and_inspect(builder, key)
    report(Row("nvidia-h200", f"8B, 2 layers, {name}", str(key), read.seconds, read.temp_bytes, read.alias_bytes,
               read.own_kernels))  # fmt: skip
    assert (read.fault, read.unread) == (None, None)
    assert read.kernels[kernel] == 4 * LAYERS
    assert all(one.stack_bytes == 0 for one in read.own_kernels)
    assert read.alias_bytes >= device_bytes(builder.state_specs, builder.mesh.shape)
    # Of a step with few rows all temporary memory is less than a weight; with many, no array has a weight's shape.
    assert compiled is not None
    if key is DECODE:
        assert read.temp_bytes < OUTPUT_BYTES + _head_products()
    wide = [f"{kind}[{out},{inputs}]" for kind in ("bf16", "f32") for out, inputs in _weights()]
    launched = [one for one in instructions(compiled.as_text()) if one.opcode in ("fusion", "custom-call", "copy")]
    outputs = [one.line.partition(f" {one.opcode}(")[0] for one in launched]
    assert not [one for one in outputs if any(shape in one for shape in wide)]


# The launches of a layer besides those of bfloat16, by rows. Three add the parts of a product, to each other or to the
# residual; cuBLAS does that in its own kernel. With quantized inputs, one launch quantizes the inputs of each product
# that no norm precedes. A norm's fusion may need a second launch, which finds the scale. Act-order takes three.
ADDED = {
    ("awq", 8): 3,
    ("awq", 64): 3,
    ("gptq, act-order", 64): 6,
    ("fp8", 8): 6,
    ("fp8", 64): 5,
    ("fp8 blocks", 64): 7,
}


@pytest.mark.parametrize(("name", "rows"), grid(ADDED, lambda one: one in (("awq", 64), ("fp8", 8))))
def test_a_step_has_few_launches_more_than_in_16_bits(name: str, rows: int) -> None:
    counts = []
    for quantization in (None, FORMATS[name][0]):
        extra = {} if quantization is None else {"quantization_config": quantization}
        made = deployed("nvidia-h200", {**LLAMA_8B_TWO_LAYERS, **extra}, tensor=1)
        builder = made.builder(mesh_of("nvidia-h200", tensor=1, data=1))
        _, compiled = compile_and_inspect(builder, ProgramKey("decode", rows, True))
        assert compiled is not None
        counts.append(sum(one.opcode in ("fusion", "custom-call", "copy") for one in instructions(compiled.as_text())))
    assert counts[1] - counts[0] <= ADDED[name, rows] * LAYERS, counts


def _weights() -> list[tuple[int, int]]:
    config = LLAMA_8B_TWO_LAYERS
    dim, ffn = config["hidden_size"], config["intermediate_size"]
    return [(6144, dim), (dim, dim), (2 * ffn, dim), (dim, ffn)]


def _head_products() -> int:
    """Return the bytes of the logits of a step, which are temporary too."""
    return DECODE_ROWS * LLAMA_8B_TWO_LAYERS["vocab_size"] * 4
