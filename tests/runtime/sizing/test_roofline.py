"""The limits of pipeline stages: each computes its own layers, a request goes through all, and the slowest one sets the
pace of many."""

from __future__ import annotations

import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.models.registry import parse_model_config
from jaxserve.runtime.devices.device import facts_of_target
from jaxserve.runtime.devices.target import load_target
from jaxserve.runtime.sizing.deployment import Deployment, deploy
from jaxserve.runtime.sizing.roofline import pipeline_roofline, roofline
from tests.tiny_model import CONFIG

H200 = load_target("nvidia-h200")
LARGER = {**CONFIG, "max_position_embeddings": 4096, "num_hidden_layers": 4}
MODELS = {
    "dense": LARGER,
    "tied": {**LARGER, "tie_word_embeddings": True},
    "windows": {
        **LARGER, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 512,
        "sliding_window_pattern": 2, "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16,
    },
    "mixture": {
        **LARGER, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip


def _deployed(name: str, **settings: object) -> Deployment:
    model = parse_model_config(MODELS[name])
    return deploy(EngineConfig(**settings), model, facts_of_target("nvidia-h200", stages=4))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
def test_stages_compute_together_what_one_device_does(name: str) -> None:
    whole = roofline(_deployed(name), H200)
    made = _deployed(name, pp_size=3, pp_layer_partition="1,1,2")
    stages = pipeline_roofline(made, H200).stages
    assert sum(one.read_bytes for one in stages) == whole.read_bytes
    assert sum(one.expert_bytes for one in stages) == whole.expert_bytes
    assert sum(one.layer_flops for one in stages) == pytest.approx(whole.layer_flops)
    assert [one.head_flops for one in stages] == [0, 0, whole.head_flops]
    for length in (100, 2048):
        assert sum(one.kv_bytes(length) for one in stages) == whole.kv_bytes(length)
        assert sum(one.prompt_flops(length) for one in stages) == pytest.approx(whole.prompt_flops(length))


def test_experts_of_other_devices_are_counted_by_stage() -> None:
    settings = {"tp_size": 2, "ep_size": 2}
    whole = roofline(_deployed("mixture", **settings), H200).idle_row_bytes
    first, second = pipeline_roofline(
        _deployed("mixture", **settings, pp_size=2, pp_layer_partition="1,3"), H200
    ).stages
    assert first.idle_row_bytes == pytest.approx(whole / 4)
    assert second.idle_row_bytes == pytest.approx(whole * 3 / 4)


def test_the_latency_is_that_of_all_stages_and_the_pace_that_of_the_slowest() -> None:
    limits = pipeline_roofline(_deployed("dense", pp_size=2, pp_layer_partition="1,3"), H200)
    first, last = limits.stages
    alone = first.decode_seconds(1, 1024) + last.decode_seconds(1, 1024)
    assert limits.step_seconds(1, 1024) == limits.decode_seconds(1, 1024) == pytest.approx(alone)
    assert last.decode_seconds(1, 1024) > first.decode_seconds(1, 1024)
    # Two parts of 32 requests: while one of them is in the last stage, the other is in the first.
    assert limits.decode_seconds(64, 1024) == pytest.approx(2 * last.decode_seconds(32, 1024))
    assert limits.step_seconds(64, 1024) == pytest.approx(
        first.decode_seconds(32, 1024) + last.decode_seconds(32, 1024)
    )
    assert limits.prefill_tokens_per_second(1024) == last.prefill_tokens_per_second(1024)
