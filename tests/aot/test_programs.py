"""Programs of the Llama family compile for an H200 and a TPU v6e that aren't here, and leave the KV pool in its place.

A Llama-3.1-8B of two layers stands for the whole: further layers are the same again. SmolLM2 is compiled as it is,
but for the H200 alone: a TPU's tiles are 128 wide, and XLA turns a pool of 64-wide heads around and back.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

import pytest

from jaxserve.runtime.batch import ProgramKey
from jaxserve.runtime.programs import UPDATE_KEY, Key
from tests.aot.conftest import Row
from tests.aot.deployments import (
    DECODE_ROWS,
    LLAMA_8B_TWO_LAYERS,
    MIXED_TOKENS,
    SMOLLM2_135M,
    deployment,
    device_bytes,
)
from tests.aot.hlo import instructions

pytestmark = pytest.mark.aot

DECODE = ProgramKey("decode", DECODE_ROWS, True)
MIXED = ProgramKey("mixed", MIXED_TOKENS, False)
MODELS = {"Llama-3.1-8B, 2 layers": LLAMA_8B_TWO_LAYERS, "SmolLM2-135M": SMOLLM2_135M}
LLAMA, SMOLLM2 = MODELS

# What may give an array of the pool's size: names for one that is there, and writing into it.
IN_PLACE = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "while", "call", "fusion", "scatter", "dynamic-update-slice",
}  # fmt: skip
COLLECTIVES = {"all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"}


@pytest.mark.parametrize(
    ("target", "model", "tensor", "key"),
    [
        *((target, LLAMA, 1, key) for target in ("nvidia-h200", "tpu-v6e") for key in (UPDATE_KEY, DECODE, MIXED)),
        ("nvidia-h200", LLAMA, 4, DECODE),
        ("tpu-v6e", LLAMA, 4, DECODE),
        ("nvidia-h200", SMOLLM2, 1, DECODE),
        ("nvidia-h200", SMOLLM2, 1, MIXED),
    ],
    ids=str,
)
def test_a_program_compiles_and_leaves_the_pool_in_place(
    target: str, model: str, tensor: int, key: Key, report: Callable[[Row], None]
) -> None:
    builder = deployment(target, MODELS[model], tensor=tensor)
    start = time.monotonic()
    compiled = builder.compile(key)
    seconds = time.monotonic() - start
    memory = compiled.memory_analysis()
    name = model if tensor == 1 else f"{model}, tensor={tensor}"
    report(Row(target, name, str(key), seconds, memory.temp_size_in_bytes, memory.alias_size_in_bytes))

    half_pool = device_bytes(builder, builder.state_specs.kv.keys)
    assert memory.alias_size_in_bytes >= device_bytes(builder, builder.state_specs)
    assert memory.temp_size_in_bytes < half_pool
    found = list(instructions(compiled.as_text()))
    assert {opcode for opcode, nbytes in found if nbytes >= half_pool} <= IN_PLACE

    collectives = collections.Counter(opcode.removesuffix("-start") for opcode, _ in found)
    layers = builder.context.model.num_layers
    # After attention and after the MLP of each layer, after the embedding, and two to find the likeliest token.
    expected = {"all-reduce": 2 * layers + 3} if tensor > 1 else {}
    assert {opcode: n for opcode, n in collectives.items() if opcode in COLLECTIVES} == expected
