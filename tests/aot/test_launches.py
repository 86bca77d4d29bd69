"""How the host launches a step on GPUs that aren't here, and how near its program comes to the roofline.

Programs are those of a Llama-3.1-8B at the default sizes, with a pool that fills the device, and of few layers where
all are alike. What is asserted depends on XLA's options and on our kernels, not on the weights.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.models.registry import parse_model_config
from jaxserve.runtime.devices.device import facts_of_target
from jaxserve.runtime.devices.target import load_target
from jaxserve.runtime.devices.topology import target_mesh
from jaxserve.runtime.programs.cost import ProgramCost
from jaxserve.runtime.programs.inspection import ProgramReport, compile_and_inspect
from jaxserve.runtime.sizing.deployment import Deployment, deploy
from jaxserve.runtime.sizing.prediction import predict
from jaxserve.runtime.step.program import ProgramKey
from tests.aot.deployments import LLAMA_8B_TWO_LAYERS
from tests.selection import grid

pytestmark = pytest.mark.aot

GREEDY, FULL = ProgramKey("decode", 64, True), ProgramKey("decode", 64, False)
MIXED = ProgramKey("mixed", 2048, False)
PROMPT_LOGPROBS = ProgramKey("prompt_logprobs", 512, False)
VERIFY = ProgramKey("verify", 64, False)
DRAW = ProgramKey("draw", 8)
KEYS = (GREEDY, FULL, MIXED, PROMPT_LOGPROBS, VERIFY, DRAW, ProgramKey("update"))
TARGETS = ("nvidia-h200", "nvidia-a100-80", "nvidia-l4", "nvidia-b200")
# Four products, two norms, the kernel of new tokens, attention to all tokens, and that between the MLP's products;
# a mixed step has a kernel for decodes and one for chunks.
# Rows of drafts are decodes to these kernels.
LAUNCHES_A_LAYER = {GREEDY: 9, VERIFY: 9, MIXED: 10}

QUICK = {
    ("nvidia-h200", 1): (FULL, MIXED, PROMPT_LOGPROBS, VERIFY, DRAW, ProgramKey("update")),
    ("nvidia-h200", 4): (FULL, DRAW),
    ("nvidia-a100-80", 1): (FULL,),
    ("nvidia-l4", 1): (MIXED,),
    ("nvidia-b200", 1): (FULL,),
}
CASES = grid(
    ((target, tensor, key) for target in TARGETS for tensor in (1, 4) for key in KEYS),
    lambda case: case[2] in QUICK.get(case[:2], ()),
)


@functools.cache
def deployed(target: str, tensor: int, layers: int, method: str = "none") -> Deployment:
    model = parse_model_config({**LLAMA_8B_TWO_LAYERS, "num_hidden_layers": layers})
    config = EngineConfig(tp_size=tensor, speculative_method=method)  # type: ignore[arg-type]
    return deploy(config, model, facts_of_target(target))


def compiled(target: str, tensor: int, layers: int, key: ProgramKey) -> tuple[ProgramReport, ProgramCost, str]:
    """Return the report, the cost and the text of a program."""
    method = "ngram" if key == VERIFY else "none"
    builder = deployed(target, tensor, layers, method).builder(target_mesh(target, tensor=tensor))
    report, program = compile_and_inspect(builder, key)
    assert report.fault is None
    assert report.cost is not None
    assert program is not None
    return report, report.cost, program.as_text()


@pytest.mark.parametrize(("target", "tensor", "key"), CASES, ids=str)
def test_a_step_is_one_command_buffer_and_never_waits_for_the_host(target: str, tensor: int, key: Any) -> None:
    report, cost, text = compiled(target, tensor, 2, key)
    assert cost.grouping is not None
    assert cost.grouping.host_waits == 0
    if tensor == 1:
        assert (cost.grouping.top, cost.grouping.command_buffers) == (1, 1)
    else:
        # Exchanges stand outside of command buffers, and what stands between two of them may be too short for one.
        assert cost.grouping.command_buffers <= sum(report.collectives.values()) + 1
    assert ".remat" not in text, "computed twice"
    assert "S(5)" not in text, "memory of the host"
    for waste in (" while(", " conditional(", " sort("):
        assert waste not in text, waste


@pytest.mark.parametrize("key", LAUNCHES_A_LAYER, ids=str)
def test_launches_of_a_layer(key: ProgramKey) -> None:
    two, three = (compiled("nvidia-h200", 1, layers, key)[1].launches for layers in (2, 3))
    assert three - two <= LAUNCHES_A_LAYER[key]


@pytest.mark.parametrize("key", [GREEDY, FULL], ids=str)
def test_a_decode_step_is_near_its_roofline(key: ProgramKey) -> None:
    _, cost, _ = compiled("nvidia-h200", 1, 32, key)
    predicted = predict(deployed("nvidia-h200", 1, 32), load_target("nvidia-h200"), key, cost)
    assert predicted.seconds <= 1.15 * predicted.limit


DRAFTS: dict[str, dict[str, Any]] = {
    "draft": {"num_hidden_layers": 1, "hidden_size": 2048, "head_dim": 64},
    "eagle": {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle"]},
    "eagle3": {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000},
}
MADE_BY = grid(
    (
        (target, method, key)
        for target in ("nvidia-h200", "tpu-v6e")
        for method in DRAFTS
        for key in (ProgramKey("draft", 64), ProgramKey("draft_read", 256), VERIFY, FULL)
    ),
    lambda case: case[2] == ProgramKey("draft", 64) or case[1:] == ("eagle3", VERIFY),
)


@pytest.mark.parametrize(("target", "method", "key"), MADE_BY, ids=str)
def test_a_draft_is_made_in_one_program(target: str, method: Any, key: Any, tmp_path: Path) -> None:
    model = {**LLAMA_8B_TWO_LAYERS, "num_hidden_layers": 8}
    (tmp_path / "config.json").write_text(json.dumps({**model, **DRAFTS[method]}))
    config = EngineConfig(speculative_method=method, speculative_model=str(tmp_path), load_format="dummy")
    made = deploy(config, parse_model_config(model), facts_of_target(target))
    report, _ = compile_and_inspect(made.builder(target_mesh(target, tensor=1)), key)
    assert report.fault is None
    assert report.cost is not None
    if target == "nvidia-h200":
        assert report.cost.grouping is not None
        assert (report.cost.grouping.command_buffers, report.cost.grouping.host_waits) == (1, 0)
