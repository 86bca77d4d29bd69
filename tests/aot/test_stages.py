"""A Llama-3.1-70B on two hosts of four H100, a pipeline stage on each: it fits, its programs compile and update the KV
pool in place, and a stage gets nothing but hidden states from the one before it.

Programs are compiled with two of the forty layers of each stage, as the others are identical; sizes are those of the
whole model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.models.registry import parse_model_config
from jaxserve.runtime.devices.device import facts_of_target
from jaxserve.runtime.devices.mesh import device_bytes
from jaxserve.runtime.programs.bundle import BundlePart
from jaxserve.runtime.programs.hlo import instructions
from jaxserve.runtime.programs.inspection import compile_and_inspect
from jaxserve.runtime.programs.table import KINDS
from jaxserve.runtime.programs.transfers import FEEDBACK_KEY
from jaxserve.runtime.sizing import aot
from jaxserve.runtime.sizing.deployment import Deployment, deploy
from jaxserve.runtime.sizing.memory import usable_bytes
from jaxserve.runtime.step.program import ProgramKey
from tests.aot.conftest import Row
from tests.aot.deployments import DECODE_ROWS, LLAMA_70B, MIXED_TOKENS
from tests.selection import grid

pytestmark = pytest.mark.aot

TARGET, STAGES, TENSOR, LAYERS = "nvidia-h100", 2, 4, 2
HIDDEN, SLOTS = LLAMA_70B["hidden_size"], 256
DECODE, MIXED = ProgramKey("decode", DECODE_ROWS, False), ProgramKey("mixed", MIXED_TOKENS, False)


def deployed(layers: int) -> Deployment:
    config = EngineConfig(
        tp_size=TENSOR,
        pp_size=STAGES,
        nnodes=STAGES,
        dist_init_addr="10.0.0.1:5000",
        page_size=16,
        max_running_requests=SLOTS,
        cuda_graph_bs=(DECODE_ROWS, SLOTS),
        chunked_prefill_size=MIXED_TOKENS,
    )
    model = parse_model_config({**LLAMA_70B, "num_hidden_layers": layers})
    return deploy(config, model, facts_of_target(TARGET, nnodes=STAGES, stages=STAGES))


@functools.cache
def parts() -> dict[str, BundlePart]:
    made = deployed(STAGES * LAYERS)
    return {part.name: part for part in aot.program_parts(made, aot.meshes_for_target(made, TARGET))}


def test_all_of_it_fits() -> None:
    made = deployed(LLAMA_70B["num_hidden_layers"])
    assert [part.model.layers for part in made.parts] == [range(40), range(40, 80)]
    for part in made.parts:
        used = part.sizes.footprint.non_pool + part.sizes.pool_bytes
        assert used <= usable_bytes(made.config, made.device.memory_bytes)
        assert part.sizes.footprint.weights == pytest.approx(141.1e9 / STAGES / TENSOR, rel=0.01)
    assert made.capacity.num_pages * made.capacity.page_size > 131072, "a request of full length"


CASES = grid(
    ((stage, key) for stage in range(STAGES) for key in (DECODE, MIXED)),
    lambda case: case != (1, MIXED),
)


@pytest.mark.parametrize(("stage", "key"), CASES, ids=str)
def test_the_programs_of_a_stage(
    stage: int, key: ProgramKey, report: Callable[[Row], None], compared_with: Callable[[Any], None]
) -> None:
    whole = deployed(LLAMA_70B["num_hidden_layers"]).parts[stage]
    compared_with(whole.sizes.footprint)
    builder: Any = parts()[f"stage-{stage}"].builder
    read, compiled = compile_and_inspect(builder, key)
    name = f"Llama-3.1-70B, {LAYERS} layers of stage {stage}, 1 x {TENSOR}"
    report(Row(TARGET, name, str(key), read.seconds, read.temp_bytes, read.alias_bytes, read.own_kernels))
    assert compiled is not None
    assert read.fault is None
    sizes = builder.mesh.shape
    assert builder.mesh.size == TENSOR
    state = device_bytes(builder.state_specs, sizes)
    assert read.alias_bytes >= state
    assert read.temp_bytes <= whole.sizes.footprint.activations
    # After attention and the MLP of each layer, and after the embedding or to draw.
    assert read.collectives["all-reduce"] == 2 * LAYERS + 1
    # Of the stage before it, a stage takes a part of the hidden states; the first one takes the last token by slot.
    memory: Any = compiled.memory_analysis()
    own = device_bytes(builder.param_specs, sizes) + state
    packed = KINDS[key.kind].packing(builder.capacity, key).size * 4
    given = key.size * HIDDEN // TENSOR * 2 if stage else SLOTS * 4
    assert memory.argument_size_in_bytes == own + packed + given
    gathered = [one.elements for one in instructions(compiled.as_text()) if one.opcode.startswith("all-gather")]
    assert [size for size in gathered if size >= key.size * HIDDEN] == [key.size * HIDDEN] * stage


@pytest.mark.parametrize("tokens", [DECODE_ROWS, MIXED_TOKENS])
def test_a_stage_sends_hidden_states_alone(tokens: int) -> None:
    compiled = parts()["transfer-0"].builder.compile(ProgramKey("send", tokens))
    found = {one.name: one for one in instructions(compiled.as_text())}
    [sent] = [one for one in found.values() if one.opcode.startswith("collective-permute")]
    assert [found[name].arrays for name in sent.operands] == [(tokens * HIDDEN // TENSOR * 2,)]
    assert "source_target_pairs={{0,4},{1,5},{2,6},{3,7}}" in sent.line
    assert not [one for one in found.values() if one.opcode.startswith(("all-", "reduce-scatter"))]


def test_the_last_stage_sends_the_last_tokens_back() -> None:
    builder = parts()["transfer-1"].builder
    assert [device.id for device in builder.mesh.devices.flat] == [*range(STAGES * TENSOR)], "as XLA wants it"
    found = {one.name: one for one in instructions(builder.compile(FEEDBACK_KEY).as_text())}
    [sent] = [one for one in found.values() if one.opcode.startswith("collective-permute")]
    assert [found[name].arrays for name in sent.operands] == [(SLOTS * 4,)]
    assert "source_target_pairs={{4,0},{5,1},{6,2},{7,3}}" in sent.line
