"""Which architectures are refused, and how."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.errors import ConfigError
from jaxserve.models import exaone4
from jaxserve.models.registry import parse_model_config
from tests.models.golden import GOLDEN
from tests.models.hub_configs import HUB


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("MambaForCausalLM", "'MambaForCausalLM' is not supported; supported: .*LlamaForCausalLM"),
        ("ChatGLMModel", "'ChatGLMModel' is not supported; GLM-4 is served from .* -hf"),
        ("Llama4ForConditionalGeneration", "is not supported; .* chunks of the context"),
        ("DeepseekV32ForCausalLM", "is not supported; .* by an indexer"),
        ("GlmMoeDsaForCausalLM", "is not supported; .* by an indexer"),
        ("DeepseekV4ForCausalLM", "is not supported; .* compressed tokens"),
    ],
)
def test_an_unknown_architecture_is_refused_with_what_to_serve_instead(architecture: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_model_config({"architectures": [architecture]})


@pytest.mark.parametrize(
    ("architecture", "fields", "reason"),
    [
        ("MiniCPM3ForCausalLM", {"kv_lora_rank": 256}, "of the models with multi-head latent attention, DeepSeek-V2"),
        (
            "KimiLinearForCausalLM",
            {"kv_lora_rank": 512, "linear_attn_config": {}},
            "it has Kimi delta attention: .* Qwen",
        ),
        ("Mamba2ForCausalLM", {"state_size": 128}, "it has Mamba layers: layers that keep states"),
        ("NemotronHForCausalLM", {"ssm_state_size": 128}, "it has Mamba layers"),
        ("Lfm2ForCausalLM", {"conv_L_cache": 3}, "it has short convolutions"),
        ("MiniMaxText01ForCausalLM", {"layernorm_linear_attention_alpha": 1}, "it has lightning attention"),
        ("OlmoHybridForCausalLM", {"linear_conv_kernel_dim": 4}, "of the models with gated delta nets, Qwen3-Next"),
        ("MadeUpForImages", {"text_config": {"mamba_d_state": 16}}, "it has Mamba layers"),
    ],
)
def test_a_field_may_tell_why_an_architecture_is_refused(
    architecture: str, fields: dict[str, object], reason: str
) -> None:
    raw = {"architectures": [architecture], "quantization_config": {"quant_method": "fp8"}, **fields}
    with pytest.raises(ConfigError, match=f"'{architecture}' is not supported; {reason}"):
        parse_model_config(raw)


def test_without_a_window_exaone_rotates_every_layer() -> None:
    raw = {**HUB["EXAONE-4.0-32B"][0], "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    for window, rotated in ((None, (True, True)), (4096, (False, False))):
        config = parse_model_config({**raw, "sliding_window": window})
        assert isinstance(config, exaone4.Config)
        assert config.rotated == rotated


@pytest.mark.parametrize(
    ("name", "renamed", "changes"),
    [
        ("qwen3_moe", {"num_experts": "num_local_experts"}, {}),
        ("qwen3_moe", {}, {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0}),
        ("qwen2_moe", {}, {"sliding_window": 0, "layer_types": ["full_attention"] * 3}),
        ("minimax_m2", {}, {"num_mtp_modules": 3, "use_mtp": True}),
        ("gpt_oss", {}, {"rope_scaling": None, "rope_theta": 150000.0}),
        ("deepseek_v3", {"num_nextn_predict_layers": "num_mtp_layers"}, {"head_dim": 16, "qk_head_dim": 40}),
        ("deepseek_v3", {}, {"n_shared_experts": None, "first_k_dense_replace": 0}),
        ("glm4_moe_lite", {}, {"first_k_dense_replace": None, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    ],
)
def test_other_spellings_of_a_config_are_read(name: str, renamed: dict[str, str], changes: dict[str, Any]) -> None:
    """As transformers 5.23 saves configs, and as the hub has them."""
    raw = json.loads((GOLDEN / name / "config.json").read_text())
    config = parse_model_config({renamed.get(field, field): value for field, value in raw.items()} | changes)
    assert config.num_experts == parse_model_config(raw).num_experts


def _numbers(raw: dict[str, Any], *at: str) -> Iterator[tuple[str, ...]]:
    """Yield the path of each number of a config."""
    for name, value in raw.items():
        if isinstance(value, dict):
            yield from _numbers(value, *at, name)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*at, name)


def _with_number(raw: dict[str, Any], path: tuple[str, ...], value: float) -> dict[str, Any]:
    first, *rest = path
    return raw | {first: _with_number(raw[first], tuple(rest), value) if rest else value}


def _parsed(raw: dict[str, Any], name: str) -> Any:
    """Return the config, None if it is refused with an error that names the field."""
    try:
        return parse_model_config(raw)
    except ConfigError as error:
        if name not in str(error):
            raise
        return None


@pytest.mark.parametrize(
    "name", ["llama_yarn", "gemma3", "granite4", "cohere2", "glm4_moe", "gpt_oss", "ministral3", "deepseek_v3"]
)
def test_numbers_that_float32_does_not_hold_are_refused(name: str) -> None:
    """Except in fields that nothing reads; and one near 0 is 0, where that is allowed."""
    raw = json.loads((GOLDEN / name / "config.json").read_text())
    config = parse_model_config(raw)
    for path in _numbers(raw):
        tiny, zero, large = (_parsed(_with_number(raw, path, value), path[-1]) for value in (1e-40, 0.0, 1e39))
        assert tiny is None or zero is not None, path
        assert large in (None, config), path
