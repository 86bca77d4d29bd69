"""Programs of hybrids compile for absent devices: states are updated in place, and a decode is near its limit."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.models.registry import parse_model_config
from jaxserve.runtime.devices.device import facts_of_target
from jaxserve.runtime.devices.target import load_target
from jaxserve.runtime.devices.topology import target_mesh
from jaxserve.runtime.programs.inspection import compile_and_inspect
from jaxserve.runtime.sizing.deployment import Deployment, deploy
from jaxserve.runtime.sizing.prediction import predict
from jaxserve.runtime.step.program import ProgramKey
from tests.models.hub_hybrids import HYBRIDS

pytestmark = pytest.mark.aot

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
DECODE, MIXED, VERIFY = ProgramKey("decode", 64, True), ProgramKey("mixed", 256, False), ProgramKey("verify", 64, False)


@functools.cache
def deployed(name: str, target: str, tensor: int, layers: int, drafts: str = "none") -> Deployment:
    """Return the deployment of the first layers of a model, in fp8 on GPUs."""
    raw: dict[str, Any] = HYBRIDS[name][0]
    text = raw["text_config"]
    text = text | {"num_hidden_layers": layers, "layer_types": text["layer_types"][:layers]}
    raw = raw | {"text_config": text} | ({"quantization_config": FP8} if target.startswith("nvidia") else {})
    config = EngineConfig(
        tp_size=tensor,
        max_running_requests=64,
        cuda_graph_bs=(64,),
        chunked_prefill_size=256,
        context_length=8192,
        speculative_method=drafts,  # type: ignore[arg-type]
        page_size=16 if target.startswith("nvidia") else 32,
    )
    return deploy(config, parse_model_config(raw), facts_of_target(target))


@pytest.mark.parametrize(
    ("name", "target", "tensor", "drafts", "key"),
    [
        ("Qwen3.6-35B-A3B", "nvidia-h100", 1, "none", MIXED),
        ("Qwen3.6-35B-A3B", "nvidia-h100", 1, "ngram", VERIFY),
        ("Qwen3.5-397B-A17B", "nvidia-h200", 8, "none", DECODE),
        ("Qwen3.6-27B", "tpu-v6e", 4, "none", DECODE),
    ],
    ids=str,
)
def test_a_program_updates_states_in_place(name: str, target: str, tensor: int, drafts: str, key: ProgramKey) -> None:
    made = deployed(name, target, tensor, 4, drafts)
    report, _ = compile_and_inspect(made.builder(target_mesh(target, tensor=tensor)), key)
    assert report.fault is None
    assert all(kernel.stack_bytes in (0, None) for kernel in report.own_kernels)


def test_a_decode_step_is_near_its_roofline() -> None:
    """On one H100, with eight layers, of which six keep states; the embedding's product is a large part of it."""
    made = deployed("Qwen3.6-35B-A3B", "nvidia-h100", 1, 8)
    report, _ = compile_and_inspect(made.builder(target_mesh("nvidia-h100")), DECODE)
    assert report.fault is None
    assert report.cost is not None
    predicted = predict(made, load_target("nvidia-h100"), DECODE, report.cost)
    assert predicted.seconds <= 1.25 * predicted.limit
