"""A Llama-3.1-70B on eight devices of one kind, as one rank of eight shards and as two of four: it fits, its programs
compile, have only the necessary collectives, and update the KV pool in place.

Programs are compiled with two of the eighty layers, as the others are identical; sizes are those of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.runtime.devices.mesh import device_bytes
from jaxserve.runtime.programs.hlo import instructions
from jaxserve.runtime.programs.inspection import compile_and_inspect
from jaxserve.runtime.sizing.memory import usable_bytes
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.slot_update import ADJUST_KEY, UPDATE_KEY
from tests.aot.conftest import Row
from tests.aot.deployments import DECODE_ROWS, LLAMA_70B, MIXED_TOKENS, deployed, deployment
from tests.selection import grid

pytestmark = pytest.mark.aot

GREEDY, DRAWN = ProgramKey("decode", DECODE_ROWS, True), ProgramKey("decode", DECODE_ROWS, False)
MIXED = ProgramKey("mixed", MIXED_TOKENS, False)
LAYERS = 2
MESHES = [("nvidia-h200", 1, 8), ("nvidia-h200", 2, 4), ("tpu-v6e", 1, 8)]


@pytest.mark.parametrize(("target", "data", "tensor"), MESHES)
def test_all_of_it_fits(target: str, data: int, tensor: int) -> None:
    made = deployed(target, LLAMA_70B, tensor=tensor, data=data)
    capacity, footprint = made.capacity, made.sizes.footprint
    pool = made.sizes.pool_bytes
    assert footprint.non_pool + pool <= usable_bytes(made.config, made.device.memory_bytes)
    # 70.6 billion parameters of two bytes each, but for norms in equal parts.
    assert footprint.weights == pytest.approx(141.1e9 / tensor, rel=0.01)
    assert capacity.num_pages * capacity.page_size > 131072, "a request of full length"


KEYS: list[ProgramKey] = [UPDATE_KEY, ADJUST_KEY, GREEDY, DRAWN, MIXED]


def _is_quick(case: tuple[str, int, int, ProgramKey]) -> bool:
    target, data, _, key = case
    return (data == 1 and key == GREEDY) or (target, data, key) == ("nvidia-h200", 2, DRAWN)


CASES = grid(((*mesh, key) for mesh in MESHES for key in KEYS), _is_quick)


@pytest.mark.parametrize(("target", "data", "tensor", "key"), CASES, ids=str)
def test_its_programs(
    target: str,
    data: int,
    tensor: int,
    key: ProgramKey,
    report: Callable[[Row], None],
    compared_with: Callable[[Any], None],
) -> None:
    whole = deployed(target, LLAMA_70B, tensor=tensor, data=data)
    compared_with(whole.sizes.footprint)
    builder = deployment(target, {**LLAMA_70B, "num_hidden_layers": LAYERS}, tensor=tensor, data=data)
    read, compiled = compile_and_inspect(builder, key)
    name = f"Llama-3.1-70B, {LAYERS} layers, {data} x {tensor}"
    report(Row(target, name, str(key), read.seconds, read.temp_bytes, read.alias_bytes, read.own_kernels))
    assert read.fault is None
    assert read.alias_bytes >= device_bytes(builder.state_specs, builder.mesh.shape)
    assert read.temp_bytes <= whole.sizes.footprint.activations
    if key in (UPDATE_KEY, ADJUST_KEY):
        assert read.collectives == {}
        return
    if key == GREEDY:
        # After attention and after the MLP of each layer, after the embedding, and two to find the likeliest token.
        assert read.collectives == {"all-reduce": 2 * LAYERS + 3}
    assert compiled is not None
    # A layer's output is exchanged whole; the logits once, so that each shard draws the tokens of its part of the rows.
    shape = builder.context.model
    tokens = MIXED_TOKENS if key == MIXED else DECODE_ROWS
    rows = min(tokens, builder.capacity.num_slots)
    exchanged = [one for one in instructions(compiled.as_text()) if one.opcode.startswith("all-")]
    moved = [one.elements for one in exchanged if one.opcode.removesuffix("-start") == "all-to-all"]
    assert len(moved) == (0 if key == GREEDY else 1)
    assert sum(moved) <= rows * shape.padded_vocab_size // tensor
    others = [one.elements for one in exchanged if not one.opcode.startswith("all-to-all")]
    assert max(others) <= tokens * shape.config.hidden_size
