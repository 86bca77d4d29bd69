"""Writes golden fixtures as GGUF files: the metadata, names and values that llama.cpp's converter writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from safetensors.numpy import load_file

from jaxserve.layers.rope import RopeConfig, frequencies
from tests.weights.conftest import GOLDEN

Tensors = dict[str, tuple[np.ndarray[Any, Any], Kind | None]]

_ARCHITECTURES = {
    "Cohere2ForCausalLM": "COHERE2",
    "Exaone4ForCausalLM": "EXAONE4",
    "Gemma2ForCausalLM": "GEMMA2",
    "Gemma3ForCausalLM": "GEMMA3",
    "Glm4ForCausalLM": "GLM4",
    "GraniteForCausalLM": "GRANITE",
    "GraniteMoeHybridForCausalLM": "GRANITE",
    "LlamaForCausalLM": "LLAMA",
    "MistralForCausalLM": "LLAMA",
    "Ministral3ForCausalLM": "MISTRAL3",
    "Olmo2ForCausalLM": "OLMO2",
    "Olmo3ForCausalLM": "OLMO2",
    "Phi3ForCausalLM": "PHI3",
    "Qwen2ForCausalLM": "QWEN2",
    "Qwen3ForCausalLM": "QWEN3",
    "SeedOssForCausalLM": "SEED_OSS",
    "SmolLM3ForCausalLM": "SMOLLM3",
    "Starcoder2ForCausalLM": "STARCODER2",
}
_PERMUTED = ("llama", "granite", "mistral3", "smollm3")
_WINDOWED = ("llama", "phi3", "gemma2", "gemma3", "cohere2", "olmo2", "exaone4")
# Metadata, and the field that it comes from: the first that a config has
_FIELDS = {
    "vocab_size": ("vocab_size",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("shared_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_attention_heads"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon"),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "ssm.conv_kernel": ("mamba_d_conv",),
    "ssm.state_size": ("mamba_d_state",),
}


def write(path: Path, tensors: Tensors, architecture: str = "qwen2", **values: Any) -> Path:
    """Write a GGUF file; `values` are keys under the architecture's name, with `__` for a dot."""
    writer = GGUFWriter(path, architecture)
    for key, value in values.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permuted(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return q's or k's rows in the order of llama.cpp's files of architecture llama and those like it."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(weight.shape)


def from_golden(
    name: str, path: Path, kind: Kind | None = None, extra: Mapping[str, np.ndarray[Any, Any]] = MappingProxyType({})
) -> Path:
    """Write a fixture as llama.cpp's converter does; matrices whose rows allow it are stored as `kind`."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    arch = MODEL_ARCH[_ARCHITECTURES[config["architectures"][0]]]
    architecture = MODEL_ARCH_NAMES[arch]
    heads = {"q": config["num_attention_heads"], "k": config.get("num_key_value_heads", config["num_attention_heads"])}
    scaling, rope_tensors = _scaling(config)
    values = {**_metadata(config, architecture), **scaling}
    names = get_tensor_name_map(arch, config["num_hidden_layers"])
    tensors: Tensors = {key: (data, None) for key, data in (rope_tensors | dict(extra)).items()}
    for hf_name, stored in _weights(name).items():
        weight = stored
        for letter, count in heads.items():
            if architecture in _PERMUTED and f".{letter}_proj." in hf_name:
                weight = permuted(weight, count)
        if architecture.startswith("gemma") and hf_name.endswith("norm.weight"):
            weight = weight.astype(np.float32) + np.float32(1)
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, hf_name
        block = GGML_QUANT_SIZES[kind][0] if kind else 1
        fits = kind is not None and weight.ndim == 2 and weight.shape[1] % block == 0
        tensors[gguf_name] = (quantize(weight, kind), kind) if fits and kind else (weight, None)
    return write(path, tensors, architecture, **{key.replace(".", "__"): value for key, value in values.items()})


def _weights(name: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return a fixture's weights, without the fused gate and up of Granite 4; bfloat16 as float32."""
    weights = {}
    for key, data in load_file(GOLDEN / name / "model.safetensors").items():
        data = data.astype(np.float32) if data.dtype == ml_dtypes.bfloat16 else data
        if "shared_mlp.input_linear" in key:
            for part, half in zip(("gate", "up"), np.split(data, 2)):
                weights[key.replace("shared_mlp.input_linear", f"mlp.{part}_proj")] = half
        else:
            weights[key.replace("shared_mlp.output_linear", "mlp.down_proj")] = data
    return weights


def _metadata(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, fields in _FIELDS.items():
        found = [config[field] for field in fields if config.get(field) is not None]
        values |= {key: found[0]} if found else {}
    local = _rope(config).get("sliding_attention", {"rope_theta": config.get("rope_local_base_freq")})["rope_theta"]
    if local:
        values["rope.freq_base_swa"] = float(local)
    if "layer_types" in config and architecture == "granite":
        values |= {"rope.scaling.finetuned": True, "attention.head_count_kv": [config["num_key_value_heads"]] * 2}
    if architecture in (*_PERMUTED, "phi3", "glm4", "cohere2"):
        values["rope.dimension_count"] = _rotated(config)
    window, types = config.get("sliding_window"), config.get("layer_types")
    if architecture in _WINDOWED and window:
        values["attention.sliding_window"] = window
        if types:
            values["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in types]
        elif isinstance(config.get("sliding_window_pattern"), int):
            values["attention.sliding_window_pattern"] = config["sliding_window_pattern"]
    return values


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    older = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    rope: dict[str, Any] = config.get("rope_parameters") or older
    return {**rope, **rope.get("full_attention", {})}


def _rotated(config: dict[str, Any]) -> int:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(head_dim * _rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))


def _scaling(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """Return the metadata of the rotation, and the tensors that scale it."""
    rope = _rope(config)
    values: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"])}
    original: Any = config.get("original_max_position_embeddings", rope.get("original_max_position_embeddings"))
    match rope.get("rope_type", rope.get("type", "default")):
        case "linear":
            values |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
        case "yarn":
            options = {
                "rope.scaling.factor": "factor",
                "rope.scaling.yarn_attn_factor": "attention_factor",
                "rope.scaling.yarn_beta_fast": "beta_fast",
                "rope.scaling.yarn_beta_slow": "beta_slow",
                "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
                "attention.temperature_scale": "llama_4_scaling_beta",
            }
            values |= {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": original}
            values |= {key: float(rope[field]) for key, field in options.items() if field in rope}
        case "llama3":
            scaled = RopeConfig(
                rope["rope_theta"],
                "llama3",
                factor=rope["factor"],
                low_freq_factor=rope["low_freq_factor"],
                high_freq_factor=rope["high_freq_factor"],
                original_max_position=original,
            )
            dim = _rotated(config)
            divisors = frequencies(RopeConfig(rope["rope_theta"]), dim)[0] / frequencies(scaled, dim)[0]
            return values, {"rope_freqs.weight": divisors}
        case "longrope":
            stretch = config["max_position_embeddings"] / original
            values["rope.scaling.original_context_length"] = original
            values["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(stretch) / math.log(original))
            return values, {
                f"rope_factors_{kind}.weight": np.asarray(rope[f"{kind}_factor"], np.float32)
                for kind in ("long", "short")
            }
    return values, {}
