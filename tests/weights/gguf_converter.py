"""Writes golden fixtures as GGUF files: the metadata, names and values that llama.cpp's converter writes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
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
    "DeepseekV2ForCausalLM": "DEEPSEEK2",
    "DeepseekV3ForCausalLM": "DEEPSEEK2",
    "Exaone4ForCausalLM": "EXAONE4",
    "Gemma2ForCausalLM": "GEMMA2",
    "Gemma3ForCausalLM": "GEMMA3",
    "Glm4ForCausalLM": "GLM4",
    "Glm4MoeForCausalLM": "GLM4_MOE",
    "GptOssForCausalLM": "GPT_OSS",
    "GraniteForCausalLM": "GRANITE",
    "GraniteMoeHybridForCausalLM": "GRANITE",
    "LlamaForCausalLM": "LLAMA",
    "MistralForCausalLM": "LLAMA",
    "MiniMaxM2ForCausalLM": "MINIMAXM2",
    "Ministral3ForCausalLM": "MISTRAL3",
    "MixtralForCausalLM": "LLAMA",
    "Olmo2ForCausalLM": "OLMO2",
    "Olmo3ForCausalLM": "OLMO2",
    "OlmoeForCausalLM": "OLMOE",
    "Phi3ForCausalLM": "PHI3",
    "Qwen2ForCausalLM": "QWEN2",
    "Qwen2MoeForCausalLM": "QWEN2MOE",
    "Qwen3ForCausalLM": "QWEN3",
    "Qwen3MoeForCausalLM": "QWEN3MOE",
    "Qwen3NextForCausalLM": "QWEN3NEXT",
    "Qwen3_5ForCausalLM": "QWEN35",
    "Qwen3_5MoeForCausalLM": "QWEN35MOE",
    "SeedOssForCausalLM": "SEED_OSS",
    "SmolLM3ForCausalLM": "SMOLLM3",
    "Starcoder2ForCausalLM": "STARCODER2",
}
_PERMUTED = ("llama", "granite", "mistral3", "smollm3")
_HYBRIDS = ("qwen3next", "qwen35", "qwen35moe")
_WINDOWED = ("llama", "phi3", "gemma2", "gemma3", "cohere2", "olmo2", "exaone4", "gpt-oss")
# Metadata, and the field that it comes from: the first that a config has
_FIELDS = {
    "vocab_size": ("vocab_size",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("shared_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_intermediate_size", "shared_expert_intermediate_size"),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_shared_count": ("n_shared_experts",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "leading_dense_block_count": ("first_k_dense_replace",),
    "nextn_predict_layers": ("num_nextn_predict_layers", "mtp_num_hidden_layers"),
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
    "ssm.conv_kernel": ("mamba_d_conv", "linear_conv_kernel_dim"),
    "ssm.state_size": ("mamba_d_state", "linear_key_head_dim"),
    "ssm.group_count": ("linear_num_key_heads",),
    "ssm.time_step_rank": ("linear_num_value_heads",),
    "full_attention_interval": ("full_attention_interval",),
}


def write(path: Path, tensors: Tensors, architecture: str = "qwen2", *, most: int = 0, **values: Any) -> Path:
    """Write a GGUF file; `values` are keys under the architecture's name, with `__` for a dot.

    With `most`, writes several files, each with at most this number of tensors, and returns the first.
    """
    writer = GGUFWriter(path, architecture, split_max_tensors=most)
    for key, value in values.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        else:
            writer.add_uint32(name, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if most else path


def permuted(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return q's or k's rows in the order of llama.cpp's files of architecture llama and those like it."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(weight.shape)


def from_golden(
    name: str | Path,
    path: Path,
    kind: Kind | None = None,
    extra: Mapping[str, np.ndarray[Any, Any]] = MappingProxyType({}),
    change: Callable[[Tensors], object] = lambda tensors: None,
    most: int = 0,
    keys: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write a fixture as llama.cpp's converter does; matrices whose rows allow it are stored as `kind`.

    Routers are stored in float32, and blocks of MXFP4 as they are. A name may be a folder that is like a fixture;
    `change` may change the tensors before they are written. `keys` are other values of metadata; None leaves one out.
    `most`: see `write`.
    """
    config = json.loads((GOLDEN / name / "config.json").read_text())
    arch = MODEL_ARCH[_ARCHITECTURES[config["architectures"][0]]]
    architecture = MODEL_ARCH_NAMES[arch]
    heads = {"q": config["num_attention_heads"], "k": config.get("num_key_value_heads", config["num_attention_heads"])}
    scaling, rope_tensors = _scaling(config)
    values = {**_metadata(config, architecture), **scaling, **keys}
    values = {key: value for key, value in values.items() if value is not None}
    names = get_tensor_name_map(arch, values["block_count"])
    # The package doesn't know yet that the converter writes those of Qwen3.5
    drafts = get_tensor_name_map(MODEL_ARCH.GLM4_MOE, values["block_count"])
    tensors: Tensors = {key: (data, None) for key, data in (rope_tensors | dict(extra)).items()}
    weights = _stacked(_weights(name))
    if "linear_num_key_heads" in config:
        weights = dict(_delta_nets(weights, config))
    for hf_name in [key for key in weights if ".kv_b_proj." in key]:
        kv_b = weights.pop(hf_name).reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
        of_keys, of_values = np.split(kv_b, [config["qk_nope_head_dim"]], axis=1)
        weights[hf_name.replace("kv_b", "k_b")] = np.ascontiguousarray(of_keys.swapaxes(1, 2))
        weights[hf_name.replace("kv_b", "v_b")] = np.ascontiguousarray(of_values)
    for hf_name, stored in weights.items():
        weight = stored
        for letter, count in heads.items():
            if architecture in _PERMUTED and f".{letter}_proj." in hf_name:
                weight = permuted(weight, count)
        if architecture.startswith("gemma") and hf_name.endswith("norm.weight"):
            weight = weight.astype(np.float32) + np.float32(1)
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias")) or drafts.get_name(hf_name, (".weight",))
        assert gguf_name is not None, hf_name
        block = GGML_QUANT_SIZES[kind][0] if kind else 1
        fits = gguf_name.endswith(".weight") and weight.ndim > 1 and weight.shape[-1] % block == 0
        if weight.dtype == np.uint8:
            tensors[gguf_name] = weight, Kind.MXFP4
        elif kind is not None and fits and "ffn_gate_inp" not in gguf_name:
            tensors[gguf_name] = quantize(weight, kind), kind
        else:
            tensors[gguf_name] = weight, None
    change(tensors)
    named = {key.replace(".", "__"): value for key, value in values.items()}
    return write(path, tensors, architecture, most=most, **named)


def _weights(name: str | Path) -> dict[str, np.ndarray[Any, Any]]:
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


def _stacked(weights: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the weights with a tensor for all experts of a layer, gate and up apart, by the converter's names."""
    found: dict[str, Any] = {}
    for key, data in weights.items():
        if expert := re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", key):
            found.setdefault(expert[1] + expert[3], {})[int(expert[2])] = data
        elif projection := re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj(_bias|_blocks|)", key):
            block, which, last = projection.groups()
            kind = "bias" if last == "_bias" else "weight"
            rows = data if last == "_bias" else data.swapaxes(1, 2)
            if last == "_blocks":
                rows = _mxfp4(data, weights[f"{key.removesuffix('_blocks')}_scales"])
            parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if which == "gate_up" else {"down": rows}
            found |= {f"{block}.{part}_proj.{kind}": np.ascontiguousarray(each) for part, each in parts.items()}
        elif not key.endswith("_scales"):
            suffix = ".weight" if key.endswith("sinks") else ""
            found[key.replace("correction_bias", "correction.bias") + suffix] = data
    return {
        name: np.stack([data[i] for i in range(len(data))]) if isinstance(data, dict) else data
        for name, data in found.items()
    }


def _delta_nets(
    weights: dict[str, np.ndarray[Any, Any]], config: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the weights of a hybrid with the values and the order of value heads that the converter writes."""
    heads, group = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    is_next = config["architectures"] == ["Qwen3NextForCausalLM"]

    def tiled(data: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
        if is_next:
            return data
        return data.reshape(heads, group, size, *data.shape[1:]).swapaxes(0, 1).reshape(data.shape)

    drafts = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
    layer = f"model.layers.{config['num_hidden_layers']}"
    for hf_name, data in weights.items():
        name, last = hf_name, hf_name.rpartition("linear_attn.")[2]
        if name.startswith("mtp."):
            own = name.removeprefix("mtp.").removeprefix("layers.0.")
            first = own.partition(".")[0]
            name = f"{layer}.{own.replace(first, drafts.get(first, first), 1)}".replace(
                f"{layer}.norm", f"{layer}.shared_head.norm"
            )
        if name.endswith("norm.weight") and ".linear_attn." not in name:
            data = data + np.float32(1)
        if last == "A_log":
            data = -np.exp(tiled(data, 1))
        elif last == "dt_bias":
            name, data = name.replace("dt_bias", "dt_proj.bias"), tiled(data, 1)
        elif last in ("in_proj_a.weight", "in_proj_b.weight"):
            data = tiled(data, 1)
        elif last == "in_proj_z.weight":
            data = tiled(data, value_dim)
        elif last == "out_proj.weight":
            data = tiled(data.T, value_dim).T
        elif last in ("in_proj_qkv.weight", "conv1d.weight"):
            keys, values = np.split(data.reshape(len(data), -1), [2 * heads * key_dim])
            data = np.concatenate([keys, tiled(values, value_dim)])
        elif last == "in_proj_qkvz.weight":
            kinds = np.split(
                data.reshape(heads, -1, data.shape[1]), np.cumsum([key_dim, key_dim, group * value_dim]), 1
            )
            q, k, v, z = (kind.reshape(-1, data.shape[1]) for kind in kinds)
            yield name.replace("qkvz", "z"), z
            name, data = name.replace("qkvz", "qkv"), np.concatenate([q, k, v])
        yield name, np.ascontiguousarray(data)


def _mxfp4(blocks: np.ndarray[Any, Any], scales: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return rows of ggml's blocks: the scale, then numbers 0 to 15 in the low and 16 to 31 in the high four bits."""
    numbers = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 2, 16)
    packed = np.concatenate([scales[..., None], numbers[..., 0, :] | numbers[..., 1, :] << 4], axis=-1)
    return packed.reshape(*blocks.shape[:2], -1)


def _metadata(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, fields in _FIELDS.items():
        found = [config[field] for field in fields if config.get(field)]
        values |= {key: found[0]} if found else {}
    values["block_count"] += values.get("nextn_predict_layers", 0)
    if architecture in ("gpt-oss", "minimax-m2"):
        values["expert_feed_forward_length"] = config["intermediate_size"]
    if architecture in ("glm4moe", "minimax-m2"):
        values["expert_gating_func"] = 2
    if architecture == "glm4moe":
        values["expert_weights_norm"] = config["norm_topk_prob"]
    if architecture == "deepseek2":
        rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
        values |= {
            "attention.head_count_kv": 1,
            "attention.kv_lora_rank": rank,
            "attention.key_length": rank + rotated,
            "attention.value_length": rank,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
            "attention.value_length_mla": config["v_head_dim"],
            "rope.dimension_count": rotated,
            "expert_gating_func": {"softmax": 1, "sigmoid": 2}[config["scoring_func"]],
        }
        values |= {"attention.q_lora_rank": config["q_lora_rank"]} if config["q_lora_rank"] else {}
        values |= {"expert_weights_norm": True} if config["norm_topk_prob"] else {}
    if "linear_num_value_heads" in config:
        values["ssm.inner_size"] = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    if architecture.startswith("qwen35"):
        values["rope.dimension_sections"] = [*_rope(config)["mrope_section"], 0]
    if architecture == "olmoe":
        values["attention.layer_norm_rms_epsilon"] = 1e-5
    local = _rope(config).get("sliding_attention", {"rope_theta": config.get("rope_local_base_freq")})["rope_theta"]
    if local:
        values["rope.freq_base_swa"] = float(local)
    if "layer_types" in config and architecture == "granite":
        values |= {"rope.scaling.finetuned": True, "attention.head_count_kv": [config["num_key_value_heads"]] * 2}
    if architecture in (*_PERMUTED, "phi3", "glm4", "glm4moe", "cohere2", "minimax-m2", *_HYBRIDS):
        values["rope.dimension_count"] = config.get("rotary_dim", _rotated(config))
    window, types = config.get("sliding_window"), config.get("layer_types")
    if architecture in _WINDOWED and window:
        values["attention.sliding_window"] = window
        if types and architecture != "gpt-oss":
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
            if "kv_lora_rank" in config:
                values["rope.scaling.yarn_log_multiplier"] *= 0.1
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
