"""The predicted time of a step: never below the roofline, and longer by what a program launches and moves in vain."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.models.registry import parse_model_config
from jaxserve.runtime.devices.device import facts_of_target
from jaxserve.runtime.devices.target import load_target
from jaxserve.runtime.programs.cost import Grouping, LaunchCost, ProgramCost
from jaxserve.runtime.sizing.deployment import Deployment, deploy
from jaxserve.runtime.sizing.prediction import CONTEXT, predict
from jaxserve.runtime.sizing.roofline import roofline
from jaxserve.runtime.step.program import ProgramKey
from tests.tiny_model import CONFIG

H200 = load_target("nvidia-h200")
DECODE, MIXED = ProgramKey("decode", 64, True), ProgramKey("mixed", 256, False)
GRAPH = Grouping(top=1, command_buffers=1, host_waits=0)


@pytest.fixture(scope="module")
def deployed() -> Deployment:
    model = parse_model_config({**CONFIG, "max_position_embeddings": 4096})
    return deploy(EngineConfig(), model, facts_of_target("nvidia-h200"))


def cost(nbytes: int, calls: int = 0, flops: float = 0.0, how: Grouping | None = GRAPH) -> ProgramCost:
    return ProgramCost((LaunchCost("product", calls, nbytes, 0, flops),), how)


def test_a_program_that_reads_what_it_must_is_at_the_roofline(deployed: Deployment) -> None:
    best = roofline(deployed, H200)
    perfect = predict(deployed, H200, DECODE, cost(best.read_bytes, how=None))
    assert perfect.seconds == pytest.approx(perfect.limit)
    assert perfect.sequences == 64
    assert perfect.limit > best.decode_seconds(64, CONTEXT), "a copy doesn't reach the datasheet's rate"


def test_a_layer_with_a_window_reads_only_its_window() -> None:
    gemma = parse_model_config(
        {
            **CONFIG, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 512,
            "sliding_window_pattern": 2, "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16,
            "max_position_embeddings": 4096,
        }
    )  # fmt: skip
    for options in ({}, {"disable_hybrid_swa_memory": True}):
        best = roofline(deploy(EngineConfig(**options), gemma, facts_of_target("nvidia-h200")), H200)
        layer_bytes, layer_flops = 2 * 2 * 16 * 2, 4 * 4 * 16  # of a token: two KV heads, four heads of 16
        assert best.kv_bytes(2048) == layer_bytes * (2048 + 512)
        assert best.kv_bytes(256) == layer_bytes * 2 * 256
        assert best.decode_flops(2048) == layer_flops * (2048 + 512)
        seen = sum(range(1, 2049)) + sum(min(i, 512) for i in range(1, 2049))
        assert best.prompt_flops(2048) == pytest.approx(layer_flops * seen, rel=1e-3)


def test_bytes_launches_exchanges_and_waits_take_time(deployed: Deployment) -> None:
    least = roofline(deployed, H200).read_bytes
    base = predict(deployed, H200, DECODE, cost(least, 10)).seconds
    rate = 0.9 * H200.memory_bandwidth
    assert predict(deployed, H200, DECODE, cost(least + 10**9, 10)).seconds - base == pytest.approx(10**9 / rate)
    assert predict(deployed, H200, DECODE, cost(least, 110)).seconds - base == pytest.approx(100 * 1.5e-6)
    assert predict(deployed, H200, DECODE, cost(least, 10), 3).seconds - base == pytest.approx(30e-6)
    waits = dataclasses.replace(GRAPH, host_waits=2)
    assert predict(deployed, H200, DECODE, cost(least, 10, how=waits)).seconds - base == pytest.approx(60e-6)


def test_a_host_with_many_launches_is_slower_than_the_device(deployed: Deployment) -> None:
    many = Grouping(top=1000, command_buffers=0, host_waits=0)
    assert predict(deployed, H200, DECODE, cost(0, 10, how=many)).seconds == pytest.approx(1000 * 4e-6)


def test_products_of_a_prompt_take_longer_than_its_bytes(deployed: Deployment) -> None:
    slow = predict(deployed, H200, MIXED, cost(1, flops=1e12))
    assert slow.seconds >= 1e12 / (0.8 * H200.peak_flops["bfloat16"])
    assert slow.sequences == 1
