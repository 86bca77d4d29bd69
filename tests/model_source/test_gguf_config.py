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
        "rope_theta": 500000.0,
        "rope_scaling": None,
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
    linear = config_of(tmp_path, values={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    old_linear = config_of(tmp_path, values={"llama.rope.scale_linear": 2.0})
    yarn = config_of(
        tmp_path,
        values={
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 8.0,
            "llama.rope.scaling.original_context_length": 64,
            "llama.rope.scaling.attn_factor": 0.5,
        },
    )
    factors = config_of(tmp_path, tensors={"rope_freqs.weight": np.array([1, 1, 2.5, 8], np.float32)})
    none = config_of(tmp_path, values={"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0})

    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert old_linear["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert yarn["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "attention_factor": pytest.approx(0.5 * (0.1 * math.log(8) + 1)),
    }
    assert factors["rope_scaling"] == {"rope_type": "factors", "factors": [1.0, 1.0, 2.5, 8.0]}
    assert none["rope_scaling"] is None


def test_a_value_by_layer_counts_if_all_are_equal(tmp_path: Path) -> None:
    assert config_of(tmp_path, values={"llama.attention.head_count_kv": [2, 2]})["num_key_value_heads"] == 2
    with pytest.raises(ConfigError, match="head_count_kv differs between layers"):
        config_of(tmp_path, values={"llama.attention.head_count_kv": [2, 1]})


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("gemma3", {}, "architecture 'gemma3' is not supported; supported: llama, qwen2, qwen3"),
        ("llama", {"values": {"llama.expert_count": 8}}, "llama.expert_count = 8 is not supported"),
        ("llama", {"values": {"llama.attention.clamp_kqv": 8.0}}, "llama.attention.clamp_kqv = 8.0"),
        ("llama", {"values": {"llama.rope.dimension_count": 4}}, "rope.dimension_count is 4 where heads have 8"),
        ("llama", {"values": {"llama.rope.scaling.type": "longrope"}}, "rope scaling 'longrope' is not supported"),
        ("llama", {"tensors": biases("q", "k", "v")}, "attention biases on q, k, v alone"),
        ("qwen2", {"values": {"qwen2.attention.sliding_window": 8}}, "sliding window is not supported"),
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
