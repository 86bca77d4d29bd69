"""Programs of a model with two KV groups compile for an H200 and a TPU v6e, and update both pools in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxserve.runtime.devices.mesh import device_bytes
from jaxserve.runtime.programs.inspection import compile_and_inspect
from jaxserve.runtime.programs.table import KINDS
from jaxserve.runtime.step.page_copies import read_key, write_key
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.slot_update import UPDATE_KEY
from tests.aot.conftest import Row
from tests.aot.deployments import DECODE_ROWS, LLAMA_8B_TWO_LAYERS, MIXED_TOKENS, deployment
from tests.models.hub_configs import GEMMA_3_27B
from tests.selection import grid

pytestmark = pytest.mark.aot

GEMMA, MISTRAL = "Gemma-3-27B, 2 layers", "Mistral-7B-v0.1, 2 layers"
MODELS: dict[str, dict[str, Any]] = {
    GEMMA: {
        **GEMMA_3_27B,
        "text_config": {**GEMMA_3_27B["text_config"], "num_hidden_layers": 2, "sliding_window_pattern": 2},
    },
    # All layers have a window: the pool of whole sequences has no layers.
    MISTRAL: {**LLAMA_8B_TWO_LAYERS, "architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    | {"vocab_size": 32000, "max_position_embeddings": 32768, "rope_theta": 10000.0, "rope_scaling": None},
}
DECODE, MIXED = ProgramKey("decode", DECODE_ROWS, True), ProgramKey("mixed", MIXED_TOKENS, False)
COPIES = [key(group) for key in (read_key, write_key) for group in (0, 1)]
KEYS: list[ProgramKey] = [UPDATE_KEY, DECODE, MIXED, *COPIES]
CASES = [(target, model, key) for target in ("nvidia-h200", "tpu-v6e") for model in MODELS for key in KEYS]


@pytest.mark.parametrize(
    ("target", "model", "key"), grid(CASES, lambda case: case[1] == GEMMA and KINDS[case[2].kind].is_step), ids=str
)
def test_a_program_leaves_both_pools_in_place(
    target: str, model: str, key: ProgramKey, report: Callable[[Row], None]
) -> None:
    builder = deployment(target, MODELS[model], tensor=1)
    pools = builder.state_specs.kv
    assert [pool.num_layers for pool in pools] == ([1, 1] if model == GEMMA else [0, 2])
    assert builder.capacity.pages_by_group[1] < builder.capacity.pages_by_group[0]
    read, _ = compile_and_inspect(builder, key)
    report(Row(target, model, str(key), read.seconds, read.temp_bytes, read.alias_bytes, read.own_kernels))
    assert read.fault is None
    assert read.unread is None
    assert read.alias_bytes >= device_bytes(builder.state_specs, builder.mesh.shape)
    if not KINDS[key.kind].is_step:  # a step's activations are larger than the pool of a window
        sizes = (device_bytes(array, builder.mesh.shape) for array in jax.tree.leaves(pools))
        assert read.temp_bytes < min(size for size in sizes if size)
