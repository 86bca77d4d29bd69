from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.model_source.gguf_config import config_from_gguf
from jaxserve.model_source.gguf_metadata import GGUFMetadata
from tests.model_source.gguf_files import HIDDEN, VOCAB, write_gguf


def config_of(path: Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return config_from_gguf(GGUFMetadata(write_gguf(path / "m.gguf", *args, **kwargs)))


MIXTURE = {"llama.expert_count": 8, "llama.expert_used_count": 2}
MINIMAX = {"minimax-m2.expert_count": 8, "minimax-m2.expert_used_count": 2, "minimax-m2.expert_feed_forward_length": 64}


def biases(*names: str) -> dict[str, np.ndarray[Any, Any]]:
    return {f"blk.0.attn_{name}.bias": np.zeros(HIDDEN, np.float32) for name in names}


def test_llama(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        values={
            "llama.rope.freq_base": 500000.0,
            "llama.rope.dimension_count": 8,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        },
    )

    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": pytest.approx(1e-5),
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


@pytest.mark.parametrize(
    ("architecture", "class_name", "tensors", "bias"),
    [
        ("qwen2", "Qwen2ForCausalLM", biases("q", "k", "v"), True),
        ("qwen3", "Qwen3ForCausalLM", {}, False),
        ("llama", "LlamaForCausalLM", biases("q", "k", "v", "output"), True),
    ],
)
def test_families(
    tmp_path: Path, architecture: str, class_name: str, tensors: dict[str, np.ndarray[Any, Any]], bias: bool
) -> None:
    config = config_of(tmp_path, architecture, tensors=tensors)

    assert (config["architectures"], config["model_type"]) == ([class_name], architecture)
    assert config["attention_bias"] is bias


def test_experts_make_another_model_of_llama(tmp_path: Path) -> None:
    config = config_of(tmp_path, values=MIXTURE | {"llama.attention.sliding_window": 64})

    assert (config["architectures"], config["model_type"]) == (["MixtralForCausalLM"], "mixtral")
    assert (config["num_local_experts"], config["num_experts_per_tok"], config["sliding_window"]) == (8, 2, 64)


def test_what_files_of_glm_leave_out_is_off(tmp_path: Path) -> None:
    sizes = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 24, "expert_shared_count": 1}
    keys = {f"glm4moe.{key}": value for key, value in sizes.items()}
    plain = config_of(tmp_path, "glm4moe", values=keys)
    more = {"leading_dense_block_count": 1, "expert_weights_norm": True, "nextn_predict_layers": 1}
    norms = {f"blk.0.attn_{letter}_norm.weight": np.ones(8, np.float32) for letter in "qk"}
    full = config_of(
        tmp_path, "glm4moe", values=keys | {f"glm4moe.{key}": value for key, value in more.items()}, tensors=norms
    )

    fields = ("first_k_dense_replace", "norm_topk_prob", "num_nextn_predict_layers", "num_hidden_layers", "use_qk_norm")
    assert [plain[field] for field in fields] == [0, False, 0, 2, False]
    assert [full[field] for field in fields] == [1, True, 1, 1, True]


def test_head_dim_of_its_own_untied_output_and_several_ends(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        "qwen3",
        values={
            "qwen3.attention.key_length": 16,
            "qwen3.attention.value_length": 16,
            "tokenizer.ggml.eos_token_id": 5,
            "tokenizer.ggml.eot_token_id": 6,
            "tokenizer.ggml.eom_token_id": 5,
        },
        tensors={"output.weight": np.zeros((VOCAB, HIDDEN), np.float32)},
    )

    assert config["head_dim"] == 16
    assert config["tie_word_embeddings"] is False
    assert config["eos_token_id"] == [5, 6]
    assert config["bos_token_id"] is None


def test_sliding_window_is_mistral(tmp_path: Path) -> None:
    config = config_of(tmp_path, values={"llama.attention.sliding_window": 64})

    assert (config["model_type"], config["sliding_window"]) == ("mistral", 64)


def test_rope_scalings(tmp_path: Path) -> None:
    def rope(
        values: dict[str, Any], tensors: dict[str, Any] | None = None, architecture: str = "llama"
    ) -> dict[str, Any]:
        keys = {f"{architecture}.rope.{key}": value for key, value in values.items()}
        found: dict[str, Any] = config_of(tmp_path, architecture, values=keys, tensors=tensors)["rope_parameters"]
        assert found.pop("rope_theta") == 10000.0
        return found

    linear = {"rope_type": "linear", "factor": 4.0}
    yarn = {"rope_type": "yarn", "factor": 8.0}
    of_yarn = {"scaling.type": "yarn", "scaling.factor": 8.0}
    temperature = 0.1 * math.log(8) + 1
    assert rope({"scaling.type": "linear", "scaling.factor": 4.0}) == linear
    assert rope({"scale_linear": 4.0}) == linear
    assert rope({"scaling.type": "none", "scaling.factor": 4.0}) == {"rope_type": "default"}
    assert rope(
        of_yarn | {"scaling.original_context_length": 64, "scaling.yarn_beta_fast": 16.0, "scaling.attn_factor": 0.5}
    ) == yarn | {
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "attention_factor": pytest.approx(0.5 * temperature),
    }
    reduced = rope(of_yarn | {"scaling.yarn_log_multiplier": 0.5})
    assert reduced == yarn | {"mscale": 1.0, "mscale_all_dim": 0.5}
    assert rope(of_yarn | {"scaling.yarn_attn_factor": 1.5}) == yarn | {"attention_factor": 1.5}
    assert rope(of_yarn | {"scaling.attn_factor": 1.5}, architecture="olmo2") == yarn | {"attention_factor": 1.5}
    divisors = np.array([1, 1, 2.5, 8], np.float32)
    assert rope({}, {"rope_freqs.weight": divisors}) == {"rope_type": "factors", "factors": divisors.tolist()}
    assert rope(
        {"scaling.original_context_length": 64, "scaling.attn_factor": 1.5},
        {"rope_factors_long.weight": divisors, "rope_factors_short.weight": 2 * divisors},
        "phi3",
    ) == {
        "rope_type": "longrope",
        "long_factor": divisors.tolist(),
        "short_factor": (2 * divisors).tolist(),
        "attention_factor": 1.5,
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 1.0,
    }


def test_layers_with_a_window_have_a_rotation_of_their_own(tmp_path: Path) -> None:
    gemma = config_of(
        tmp_path,
        "gemma3",
        values={
            "gemma3.attention.sliding_window": 16,
            "gemma3.rope.freq_base": 1e6,
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": 8.0,
        },
    )
    olmo = config_of(tmp_path, "olmo2", values={"olmo2.attention.sliding_window": 16, "olmo2.rope.freq_base": 500000.0})

    assert gemma["rope_parameters"] == {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    assert olmo["rope_parameters"]["sliding_attention"]["rope_theta"] == 500000.0
    assert olmo["model_type"] == "olmo3"
    assert config_of(tmp_path, "olmo2")["model_type"] == "olmo2"


def test_windows_by_period_and_by_layer(tmp_path: Path) -> None:
    def layers(architecture: str, **values: Any) -> list[bool]:
        keys = {f"{architecture}.attention.{key}": value for key, value in values.items()}
        keys[f"{architecture}.block_count"] = 6
        config = config_of(tmp_path, architecture, values=keys)
        assert config.get("sliding_window") == values.get("sliding_window")
        return [kind == "sliding_attention" for kind in config.get("layer_types", [])]

    assert layers("gemma2", sliding_window=16) == [True, False] * 3
    assert layers("gemma3", sliding_window=16) == [True] * 5 + [False]
    assert layers("cohere2", sliding_window=16, sliding_window_pattern=3) == [True, True, False] * 2
    listed = [True, False, False, True, True, False]
    assert layers("exaone4", sliding_window=16, sliding_window_pattern=listed) == listed
    assert layers("exaone4", sliding_window_pattern=listed) == []
    with pytest.raises(ConfigError, match="sliding_window_pattern has 2 elements for 6 layers"):
        layers("exaone4", sliding_window=16, sliding_window_pattern=[True, False])


@pytest.mark.parametrize(
    ("architecture", "layers", "scale"),
    [("gemma2", 26, 256), ("gemma2", 46, 8), ("gemma3", 62, 8), ("gemma3", 46, 256)],
)
def test_the_27b_of_gemma_scales_queries_by_the_width_per_head(
    tmp_path: Path, architecture: str, layers: int, scale: int
) -> None:
    values = {f"{architecture}.block_count": layers, f"{architecture}.attention.key_length": 256}
    assert config_of(tmp_path, architecture, values=values)["query_pre_attn_scalar"] == scale


def test_dense_granite_4_has_the_keys_of_a_hybrid(tmp_path: Path) -> None:
    values = {"granite.ssm.conv_kernel": 4, "granite.expert_shared_feed_forward_length": 64, "granite.expert_count": 0}
    config = config_of(tmp_path, "granite", values=values | {"granite.rope.scaling.finetuned": True})

    assert config["model_type"] == "granite"


def test_a_value_by_layer_counts_if_all_are_equal(tmp_path: Path) -> None:
    assert config_of(tmp_path, values={"llama.attention.head_count_kv": [2, 2]})["num_key_value_heads"] == 2
    with pytest.raises(ConfigError, match="head_count_kv differs between layers"):
        config_of(tmp_path, values={"llama.attention.head_count_kv": [2, 1]})


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("gemma", {}, "architecture 'gemma' is not supported; supported: llama, qwen2, qwen3, gemma2, gemma3, phi3,"),
        ("granitehybrid", {}, "architecture 'granitehybrid' is not supported"),
        ("qwen2", {"values": {"qwen2.expert_count": 8}}, "qwen2.expert_count = 8 is not supported"),
        ("llama", {"values": {"llama.expert_count": 8}}, "llama.expert_used_count is missing"),
        ("llama", {"values": {"llama.expert_count": -1}}, "llama.expert_count should be a whole number"),
        ("llama", {"values": MIXTURE | {"llama.expert_weights_scale": 2.5}}, "llama.expert_weights_scale = 2.5 is not"),
        ("qwen3moe", {"values": {"qwen3moe.expert_used_count": 2}}, "qwen3moe.expert_count is missing"),
        ("minimax-m2", {"values": {**MINIMAX, "minimax-m2.expert_gating_func": 1}}, "gating_func = 1 is not supported"),
        ("minimax-m2", {"values": {**MINIMAX, "minimax-m2.nextn_predict_layers": 1}}, "predict_layers = 1 is not"),
        (
            "glm4moe",
            {"values": {"glm4moe.nextn_predict_layers": 2}},
            r"predict_layers should be a whole number in \[0, 1",
        ),
        ("llama", {"values": {"llama.attention.clamp_kqv": 8.0}}, "llama.attention.clamp_kqv = 8.0"),
        ("llama", {"values": {"llama.logit_scale": 8.0}}, "llama.logit_scale = 8.0"),
        ("llama", {"values": {"llama.attention.value_length": 4}}, "value_length = 4 is not supported; only 8 is"),
        ("llama", {"values": {"llama.rope.dimension_count": 4}}, "dimension_count = 4 is not supported; only 8 is"),
        ("llama", {"values": {"llama.rope.scaling.type": "longrope"}}, "'longrope' with no tensor of divisors is not"),
        ("llama", {"values": {"llama.rope.scaling.yarn_ext_factor": 0.0}}, "yarn_ext_factor = 0.0 is not supported"),
        ("llama", {"values": {"llama.rope.scaling.attn_factor": 2.0}}, "attn_factor = 2.0 is not supported; only 1.0"),
        ("granite", {"values": {"granite.rope.scaling.finetuned": False}}, "finetuned = False is not supported"),
        ("gemma2", {"values": {"gemma2.attn_logit_softcapping": 0.0}}, "attn_logit_softcapping should be a number in"),
        ("llama", {"tensors": biases("q", "k", "v")}, "a bias of attn_q, attn_k, attn_v alone is not supported"),
        ("qwen2", {"values": {"qwen2.attention.sliding_window": 8}}, "qwen2.attention.sliding_window = 8 is not"),
        ("llama", {"without": ("llama.block_count",)}, "llama.block_count is missing"),
        ("llama", {"without": ("token_embd.weight",)}, "no tensor token_embd.weight"),
    ],
)
def test_keys_that_change_the_mathematics_are_refused_by_name(
    tmp_path: Path, architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, architecture, **changes)


def test_an_unknown_key_that_is_off_is_ignored(tmp_path: Path) -> None:
    config_of(tmp_path, values={"llama.expert_count": 0, "llama.use_parallel_residual": False})
