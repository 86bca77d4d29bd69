"""Mixtures of experts compile for devices that aren't here, at the sizes of models of the hub and with two layers: few
launches, no copy of a weight, only the necessary exchanges, and the memory that was planned.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.config.data_parallel import resolve_dp_mode
from jaxserve.config.schema import EngineConfig
from jaxserve.models.registry import parse_model_config
from jaxserve.runtime.devices.device import facts_of_target
from jaxserve.runtime.devices.mesh import device_bytes
from jaxserve.runtime.devices.target import load_target
from jaxserve.runtime.devices.topology import target_mesh
from jaxserve.runtime.programs.cost import ProgramCost
from jaxserve.runtime.programs.hlo import instructions
from jaxserve.runtime.programs.inspection import ProgramReport, compile_and_inspect
from jaxserve.runtime.sizing.deployment import Deployment, deploy
from jaxserve.runtime.sizing.memory import usable_bytes
from jaxserve.runtime.sizing.prediction import predict
from jaxserve.runtime.step.program import ProgramKey
from tests.aot.conftest import Row
from tests.models.hub_mixtures import MIXTURES
from tests.selection import grid

pytestmark = pytest.mark.aot

GREEDY, MIXED = ProgramKey("decode", 64, True), ProgramKey("mixed", 2048, False)
QWEN_30B, QWEN_235B, GPT_OSS = "Qwen3-30B-A3B", "Qwen3-235B-A22B", "gpt-oss-120b"
DEEPSEEK, KIMI = "DeepSeek-V3", "Kimi-K2"
LAYERS = 2
# Attention as in a dense model (6), then: the norm, the router, its choice, the sort, two products, the sum, and two of
# the gathers of rows that the kernel of few rows needs.
MOST_LAUNCHES_A_LAYER = 15
# Inputs of products in fp8 are converted in two launches, sums of parts added in one.
MOST_LATENT_LAUNCHES_A_LAYER = 40
ONE_RANK: dict[str, Any] = {"tp_size": 8, "ep_size": 8}
RANKS: dict[str, Any] = {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}
RAGGED = RANKS | {"all2all_backend": "ragged_all_to_all"}
TWO_RANKS: dict[str, Any] = {"tp_size": 8, "dp_size": 2, "enable_dp_attention": True}
TWO_HOSTS: dict[str, Any] = {"tp_size": 16, "dp_size": 16, "enable_dp_attention": True}


@functools.cache
def deployed(target: str, name: str, layers: int | None = LAYERS, **mesh: Any) -> Deployment:
    raw, _ = MIXTURES[name]
    if layers is not None:
        types = {"layer_types": raw["layer_types"][:layers]} if "layer_types" in raw else {}
        dense = {"first_k_dense_replace": 1} if "first_k_dense_replace" in raw else {}
        raw = raw | types | dense | {"num_hidden_layers": layers}
    settings: dict[str, Any] = {"page_size": 16 if target.startswith("nvidia") else 32, "cuda_graph_bs": (64, 256)}
    config = resolve_dp_mode(EngineConfig(max_running_requests=256, **settings, **mesh))
    hosts = -(-config.tp_size // 8) if target.startswith("nvidia") else 1
    return deploy(config, parse_model_config(raw), facts_of_target(target, hosts))


def compiled(target: str, name: str, key: ProgramKey, layers: int = LAYERS, **mesh: Any) -> tuple[ProgramReport, str]:
    made = deployed(target, name, layers, **mesh)
    builder = made.builder(target_mesh(target, **made.mesh_sizes))
    report, program = compile_and_inspect(builder, key)
    assert report.fault is None
    assert report.alias_bytes >= device_bytes(builder.state_specs, made.axis_sizes)
    assert program is not None
    return report, program.as_text()


def test_launches_of_a_layer() -> None:
    two, three = (compiled("nvidia-h200", QWEN_30B, GREEDY, layers)[0].cost for layers in (2, 3))
    assert two is not None
    assert three is not None
    assert three.launches - two.launches <= MOST_LAUNCHES_A_LAYER
    assert two.grouping is not None
    assert (two.grouping.command_buffers, two.grouping.host_waits) == (1, 0)


CASES = [
    ("nvidia-h200", QWEN_30B, GREEDY, {}),
    ("nvidia-h200", QWEN_30B, MIXED, {}),
    ("nvidia-h200", GPT_OSS, GREEDY, {}),
    ("nvidia-h200", GPT_OSS, MIXED, {}),
    ("nvidia-a100-80", QWEN_30B, GREEDY, {}),
    ("nvidia-h200", QWEN_235B, GREEDY, ONE_RANK),
    ("nvidia-h200", QWEN_235B, GREEDY, RANKS),
    ("nvidia-h200", QWEN_235B, GREEDY, TWO_RANKS),
    ("nvidia-h200", QWEN_235B, MIXED, RANKS),
    ("nvidia-h200", QWEN_235B, MIXED, RAGGED),
    ("nvidia-h200", GPT_OSS, GREEDY, RANKS),
    ("nvidia-h200", DEEPSEEK, GREEDY, RANKS),
    ("nvidia-h200", DEEPSEEK, MIXED, RANKS),
    ("nvidia-h200", DEEPSEEK, GREEDY, ONE_RANK),
    ("nvidia-h100", DEEPSEEK, GREEDY, TWO_HOSTS),
    ("nvidia-h200", KIMI, MIXED, ONE_RANK),
    ("tpu-v6e", DEEPSEEK, GREEDY, RANKS),
    ("tpu-v6e", DEEPSEEK, MIXED, ONE_RANK),
    ("tpu-v6e", QWEN_235B, GREEDY, ONE_RANK),
    ("tpu-v6e", QWEN_235B, GREEDY, RANKS),
    ("tpu-v6e", QWEN_235B, MIXED, RANKS),
    ("tpu-v6e", GPT_OSS, MIXED, RANKS),
    ("tpu-v6e", GPT_OSS, GREEDY, ONE_RANK),
    ("tpu-v6e", GPT_OSS, MIXED, ONE_RANK),
]
QUICK = (
    ("nvidia-h200", GPT_OSS, GREEDY, {}),
    ("nvidia-h200", QWEN_235B, GREEDY, RANKS),
    ("nvidia-h200", DEEPSEEK, MIXED, RANKS),
    ("nvidia-h100", DEEPSEEK, GREEDY, TWO_HOSTS),
    ("tpu-v6e", QWEN_235B, GREEDY, RANKS),
    ("tpu-v6e", GPT_OSS, GREEDY, ONE_RANK),
)


@pytest.mark.parametrize(("target", "name", "key", "mesh"), grid(CASES, QUICK.__contains__), ids=str)
def test_programs(
    target: str,
    name: str,
    key: ProgramKey,
    mesh: dict[str, Any],
    report: Callable[[Row], None],
    compared_with: Callable[[Any], None],
) -> None:
    made = deployed(target, name, **mesh)
    compared_with(made.sizes.footprint)
    read, text = compiled(target, name, key, **mesh)
    described = f"{name}, {LAYERS} layers, {made.data} x {made.tensor}, experts in {made.divided.expert_parts}"
    report(Row(target, described, str(key), read.seconds, read.temp_bytes, read.alias_bytes, read.own_kernels))
    assert read.temp_bytes <= made.sizes.footprint.activations
    assert any("grouped_matmul" in kernel for kernel in read.kernels), read.kernels
    model = made.model.config
    down = model.num_experts * model.expert_size * model.hidden_size // made.num_devices
    weights = {down * matrices // parts for matrices in (1, 2) for parts in (1, 2)}  # In four bits, two are a byte
    moved = [one for one in instructions(text) if one.opcode.startswith(("copy", "transpose"))]
    assert not [one for one in moved if one.elements in weights]
    if made.model.ragged_exchange and key == MIXED:
        assert read.collectives["ragged-all-to-all"] == 2 * LAYERS
    if key != GREEDY:
        return
    # Tokens go to the experts of all ranks and back; else the outputs of attention and experts are added, those of the
    # embedding, and the likeliest token is found in two exchanges.
    # XLA writes a TPU's reduce-scatter as an all-reduce inside a fusion.
    back = "reduce-scatter" if target.startswith("nvidia") else "all-reduce"
    mixtures = len(model.mixture_layers)
    exchanged = {"all-gather": mixtures, back: mixtures} if made.divided.over_ranks else {}
    if made.tensor > 1:
        exchanged["all-reduce"] = 2 * LAYERS + 3
    assert read.collectives == exchanged


def test_latent_attention_is_two_kernels_and_a_slice_beside_its_products() -> None:
    """And the step of DeepSeek-V3 on eight H200 is predicted near its limit: launches and exchanges are the rest."""
    reports = [compiled("nvidia-h200", DEEPSEEK, GREEDY, layers, **RANKS)[0] for layers in (2, 3)]
    two, three = (report.cost for report in reports)
    assert two is not None
    assert three is not None

    def kernels(cost: ProgramCost) -> Counter[str]:
        """Count what attention launches besides products, the sums of their parts, and inputs' conversions to fp8."""
        return Counter({one.kernel: one.calls for one in cost.kinds if "attention" in one.kernel})

    of_a_layer = kernels(three) - kernels(two)
    assert of_a_layer["paged_attention_write_latent (triton)"] == 1
    assert of_a_layer["paged_attention_decode (triton)"] == 1
    assert of_a_layer["attention/slice"] == 1
    known = ("paged_attention", "attention/slice", "attention/max", "attention/convert_element_type", "dot_general")
    assert not [kernel for kernel in of_a_layer if not any(name in kernel for name in known)], of_a_layer
    assert three.launches - two.launches <= MOST_LATENT_LAUNCHES_A_LAYER
    seconds, limits = zip(
        *(
            (found.seconds, found.limit)
            for layers, report, cost in zip((2, 3), reports, (two, three))
            for found in [
                predict(
                    deployed("nvidia-h200", DEEPSEEK, layers, **RANKS),
                    load_target("nvidia-h200"),
                    GREEDY,
                    cost,
                    sum(report.collectives.values()),
                )
            ]
        )
    )
    assert seconds[1] - seconds[0] <= 1.35 * (limits[1] - limits[0])


@pytest.mark.parametrize(
    ("target", "name", "mesh"),
    [
        ("nvidia-h200", GPT_OSS, {}),
        ("nvidia-h200", DEEPSEEK, RANKS),
        ("nvidia-h100", DEEPSEEK, TWO_HOSTS | {"context_length": 16384}),
        ("nvidia-h200", QWEN_235B, RANKS),
        ("nvidia-h200", QWEN_235B, ONE_RANK),
        ("tpu-v6e", QWEN_30B, {"tp_size": 4, "ep_size": 4}),
    ],
    ids=str,
)
def test_whole_models_fit(target: str, name: str, mesh: dict[str, Any]) -> None:
    made = deployed(target, name, None, **mesh)
    assert made.sizes.footprint.non_pool + made.sizes.pool_bytes <= usable_bytes(made.config, made.device.memory_bytes)
    assert made.capacity.num_pages * made.capacity.page_size > 2 * made.capacity.max_model_len
