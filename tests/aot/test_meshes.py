"""A Llama-3.1-70B on eight devices of one kind, as one rank of eight shards and as two of four: it fits, its programs
compile, exchange what they must, and leave the KV pool in its place.

Programs are compiled with two of the eighty layers, as further ones are the same again; sizes are those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jaxserve.runtime.devices.mesh import device_bytes
from jaxserve.runtime.programs.builder import UPDATE_KEY
from jaxserve.runtime.programs.inspection import compile_and_read, instructions
from jaxserve.runtime.programs.program_set import Key
from jaxserve.runtime.sizing.memory import usable_bytes
from jaxserve.runtime.step.batch import ProgramKey
from tests.aot.conftest import Row
from tests.aot.deployments import DECODE_ROWS, LLAMA_70B, MIXED_TOKENS, deployed, deployment

pytestmark = pytest.mark.aot

GREEDY, DRAWN = ProgramKey("decode", DECODE_ROWS, True), ProgramKey("decode", DECODE_ROWS, False)
MIXED = ProgramKey("mixed", MIXED_TOKENS, False)
LAYERS = 2
MESHES = [("nvidia-h200", 1, 8), ("nvidia-h200", 2, 4), ("tpu-v6e", 1, 8)]


@pytest.mark.parametrize(("target", "data", "tensor"), MESHES)
def test_all_of_it_fits(target: str, data: int, tensor: int) -> None:
    made = deployed(target, LLAMA_70B, tensor=tensor, data=data)
    capacity, footprint = made.capacity, made.sizes.footprint
    pool = footprint.kv_per_token * capacity.num_pages * capacity.page_size
    assert footprint.taken + pool <= usable_bytes(made.config, made.device.memory_bytes)
    # 70.6 billion parameters of two bytes each, but for norms in equal parts.
    assert footprint.weights == pytest.approx(141.1e9 / tensor, rel=0.01)
    assert capacity.num_pages * capacity.page_size > 131072, "a request of full length"


@pytest.mark.parametrize("key", [UPDATE_KEY, GREEDY, DRAWN, MIXED], ids=str)
@pytest.mark.parametrize(("target", "data", "tensor"), MESHES)
def test_its_programs(target: str, data: int, tensor: int, key: Key, report: Callable[[Row], None]) -> None:
    builder = deployment(target, {**LLAMA_70B, "num_hidden_layers": LAYERS}, tensor=tensor, data=data)
    read, compiled = compile_and_read(builder, key)
    name = f"Llama-3.1-70B, {LAYERS} layers, {data} x {tensor}"
    report(Row(target, name, str(key), read.seconds, read.temp_bytes, read.alias_bytes, read.own_kernels))
    assert read.fault is None
    assert read.alias_bytes >= device_bytes(builder.state_specs, builder.mesh.shape)
    whole = deployed(target, LLAMA_70B, tensor=tensor, data=data)
    assert read.temp_bytes <= whole.sizes.footprint.activations
    if key == UPDATE_KEY:
        assert read.collectives == {}
        return
    if key == GREEDY:
        # After attention and after the MLP of each layer, after the embedding, and two to find the likeliest token.
        assert read.collectives == {"all-reduce": 2 * LAYERS + 3}
    assert compiled is not None
    # A layer's output is exchanged whole, of the logits only what the sampler found in each shard.
    shape = builder.context.model
    tokens = MIXED_TOKENS if key == MIXED else DECODE_ROWS
    exchanged = [one.elements for one in instructions(compiled.as_text()) if one.opcode.startswith("all-")]
    assert max(exchanged) <= tokens * shape.hidden_size
