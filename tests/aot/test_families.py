"""Programs of the families' real shapes compile for an H200 and a TPU v6e without either: windows, caps, wide norms.

Each model is compiled with one layer of each kind, as the others are identical.
"""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.runtime.devices.mesh import device_bytes
from jaxserve.runtime.programs.inspection import compile_and_inspect
from jaxserve.runtime.step.program import ProgramKey
from tests.aot.deployments import DECODE_ROWS, MIXED_TOKENS, deployment
from tests.models.hub_configs import GEMMA_3_27B, GEMMA_4_31B, GEMMA_4_E2B, OLMO_2_32B, PHI_4
from tests.selection import grid

pytestmark = pytest.mark.aot

_ONE_OF_EACH = {"num_hidden_layers": 2, "sliding_window_pattern": 2}
_TYPES = ["sliding_attention", "full_attention"]
_TWO = {"num_hidden_layers": 2, "layer_types": _TYPES}
_TWO_REUSING = {"num_hidden_layers": 4, "layer_types": _TYPES * 2, "num_kv_shared_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Gemma-3-27B": {**GEMMA_3_27B, "text_config": {**GEMMA_3_27B["text_config"], **_ONE_OF_EACH}},
    "Gemma-4-31B": {**GEMMA_4_31B, "text_config": {**GEMMA_4_31B["text_config"], **_TWO}},
    "Gemma-4-E2B": {**GEMMA_4_E2B, "text_config": {**GEMMA_4_E2B["text_config"], **_TWO_REUSING}},
    "Phi-4": {**PHI_4, "num_hidden_layers": 1},
    "OLMo-2-32B": {**OLMO_2_32B, "num_hidden_layers": 1},
}
KERNELS = {"nvidia-h200": "triton", "tpu-v6e": "mosaic tpu"}
DECODE, MIXED = ProgramKey("decode", DECODE_ROWS, True), ProgramKey("mixed", MIXED_TOKENS, False)
CASES = [(target, model, key) for target in KERNELS for model in MODELS for key in (DECODE, MIXED)]
SLOW = {("tpu-v6e", model, MIXED) for model in ("Phi-4", "Gemma-4-31B", "Gemma-4-E2B")}
"""Their samplers sort for half a minute, as the others' do; Phi-4's layers are the simplest, Gemma 4's take minutes."""


@pytest.mark.parametrize(("target", "model", "key"), grid(CASES, lambda case: case not in SLOW), ids=str)
def test_a_familys_program_compiles_and_leaves_the_pool_in_place(target: str, model: str, key: ProgramKey) -> None:
    builder = deployment(target, MODELS[model], tensor=1)
    read, _ = compile_and_inspect(builder, key)
    assert read.fault is None
    assert read.alias_bytes >= device_bytes(builder.state_specs, builder.mesh.shape)
    kernels = {name: count for name, count in read.kernels.items() if name.endswith(f"({KERNELS[target]})")}
    assert sum(kernels.values()) >= builder.context.model.config.num_layers, read.kernels
    for one in read.own_kernels:
        assert target == "tpu-v6e" or one.stack_bytes == 0, f"{one.kernel} spills"
