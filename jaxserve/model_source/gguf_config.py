"""Makes a config in Hugging Face's form from the metadata of a GGUF file; a key that it doesn't know is an error."""

from __future__ import annotations

import math
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import (
    CONTEXT,
    HEAD_DIM,
    HEADS,
    LAYERS,
    NON_NEGATIVE,
    NORM_EPSILON,
    POSITIVE,
    ROPE_FACTOR,
    ROPE_THETA,
    WIDTH,
    Fields,
    Range,
    abbreviate,
)
from jaxserve.model_source.gguf_metadata import GGUFMetadata

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
# Keys under the architecture's name that are read below, or that don't change the mathematics
_KNOWN_KEYS = {
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.finetuned",
    "tensor_data_layout",
}

_NON_NEGATIVE_LENGTH = Range(0, CONTEXT.most)


def config_from_gguf(metadata: GGUFMetadata) -> dict[str, Any]:
    """Return the config.json that the model would have. Raise `ConfigError` naming the architecture or key at fault.

    A GGUF file stores Llama 3's scaled frequencies as a tensor of divisors, `rope_freqs.weight`. They become
    `rope_scaling = {"rope_type": "factors", "factors": [...]}`: frequency i is divided by factor i.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"{metadata.path}: GGUF architecture {abbreviate(architecture)} is not supported; "
            f"supported: {', '.join(_ARCHITECTURES)}"
        )
    _refuse_unknown_keys(metadata, str(architecture))
    class_name, model_type = _ARCHITECTURES[str(architecture)]
    reader = _ArchitectureKeys(metadata, f"{architecture}.")
    hidden_size, (num_heads, num_kv_heads) = reader.integer("embedding_length", WIDTH), head_counts(metadata)
    window = reader.integer("attention.sliding_window", _NON_NEGATIVE_LENGTH, 0)
    if window:
        class_name, model_type = _sliding_window_class(metadata, model_type)
    tensors = metadata.tensors
    if "token_embd.weight" not in tensors:
        raise ConfigError(f"{metadata.path} has no tensor token_embd.weight: it isn't a complete model")
    embedding = tensors["token_embd.weight"].shape
    if len(embedding) != 2:
        raise ConfigError(f"{metadata.path}: tensor token_embd.weight has {len(embedding)} dimensions instead of 2")
    eos_ids = _token_ids(metadata, embedding[0], "eos", "eot", "eom")
    bos_ids = _token_ids(metadata, embedding[0], "bos")
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": embedding[0],
        "hidden_size": hidden_size,
        "intermediate_size": reader.integer("feed_forward_length", WIDTH),
        "num_hidden_layers": reader.integer("block_count", LAYERS),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": _head_dim(reader, hidden_size // num_heads),
        "hidden_act": "silu",
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon", NORM_EPSILON),
        "rope_theta": reader.number("rope.freq_base", ROPE_THETA, 10000.0),
        "rope_scaling": _rope_scaling(reader),
        "max_position_embeddings": reader.integer("context_length", CONTEXT),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": _attention_bias(metadata, model_type),
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        **({"sliding_window": window} if window else {}),
        "bos_token_id": bos_ids[0] if bos_ids else None,
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids or None,
    }


def head_counts(metadata: GGUFMetadata) -> tuple[int, int]:
    """Return the number of query heads and the number of KV heads."""
    reader = _ArchitectureKeys(metadata, f"{metadata.get('general.architecture')}.")
    heads = reader.integer("attention.head_count", HEADS)
    return heads, reader.integer("attention.head_count_kv", HEADS, heads)


def _sliding_window_class(metadata: GGUFMetadata, model_type: str) -> tuple[str, str]:
    if model_type != "llama":
        raise ConfigError(f"{metadata.path}: a sliding window is not supported for GGUF files of {model_type}")
    return "MistralForCausalLM", "mistral"


class _ArchitectureKeys:
    """The keys under one architecture's prefix. An array with an element per layer is one value if all are equal."""

    def __init__(self, metadata: GGUFMetadata, prefix: str) -> None:
        self.metadata, self.prefix = metadata, prefix

    def number(self, name: str, allowed: Range, default: float | None = None) -> float:
        return self._fields(name).number(self.prefix + name, allowed, default)

    def integer(self, name: str, allowed: Range, default: int | None = None) -> int:
        return self._fields(name).integer(self.prefix + name, allowed, default)

    def text(self, name: str) -> str | None:
        value = self.metadata.get(self.prefix + name)
        return value if isinstance(value, str) else None

    def _fields(self, name: str) -> Fields:
        key = self.prefix + name
        per_layer = self.metadata.array(key)
        if per_layer is None:
            return self.metadata.fields
        if len(set(per_layer)) != 1:
            raise ConfigError(
                f"{self.metadata.path}: {key} differs between layers, which is not supported: {abbreviate(per_layer)}"
            )
        return Fields({key: per_layer[0]}, self.metadata.fields.where)


def _refuse_unknown_keys(metadata: GGUFMetadata, architecture: str) -> None:
    prefix = f"{architecture}."
    for key in metadata:
        if not key.startswith(prefix) or key.removeprefix(prefix) in _KNOWN_KEYS:
            continue
        value = metadata.get(key)
        if value is None or value:  # zero and false mean that the feature is off
            raise ConfigError(
                f"{metadata.path}: key {key} = {abbreviate(value)} is not supported for GGUF files of architecture "
                f"{architecture}"
            )


def _head_dim(reader: _ArchitectureKeys, default: int) -> int:
    head_dim = reader.integer("attention.key_length", HEAD_DIM, default)
    for name in ("attention.value_length", "rope.dimension_count"):
        other = reader.integer(name, HEAD_DIM, head_dim)
        if other != head_dim:
            raise ConfigError(
                f"{reader.metadata.path}: {reader.prefix}{name} is {other} where heads have {head_dim} dimensions; "
                "only equal ones are supported"
            )
    return head_dim


def _attention_bias(metadata: GGUFMetadata, model_type: str) -> bool:
    has = {name: f"blk.0.attn_{name}.bias" in metadata.tensors for name in ("q", "k", "v", "output")}
    projections = {has["q"], has["k"], has["v"]}
    # Qwen2 has no bias on the output projection; in Hugging Face's Llama `attention_bias` means all four
    wanted_output = has["q"] and model_type != "qwen2"
    if len(projections) != 1 or has["output"] != wanted_output:
        present = ", ".join(name for name, found in has.items() if found)
        raise ConfigError(f"{metadata.path}: attention biases on {present} alone are not supported for {model_type}")
    return has["q"]


def _rope_scaling(reader: _ArchitectureKeys) -> dict[str, Any] | None:
    kind, path = reader.text("rope.scaling.type"), reader.metadata.path
    factor = reader.number("rope.scaling.factor", NON_NEGATIVE, reader.number("rope.scale_linear", NON_NEGATIVE, 1.0))
    if "rope_freqs.weight" in reader.metadata.tensors:
        if kind not in (None, "none", "llama3"):
            raise ConfigError(f"{path}: rope_freqs.weight together with rope scaling {kind!r} is not supported")
        factors = reader.metadata.float32_tensor("rope_freqs.weight")
        return {"rope_type": "factors", "factors": factors}
    if kind in (None, "linear"):
        return None if factor in (0.0, 1.0) else {"rope_type": "linear", "factor": factor}
    if kind == "none":
        return None
    if kind != "yarn":
        raise ConfigError(f"{path}: rope scaling {kind!r} is not supported for GGUF files; supported: linear, yarn")
    if factor not in ROPE_FACTOR:
        raise reader.metadata.fields.error(f"{reader.prefix}rope.scaling.factor", f"a number in {ROPE_FACTOR}")
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if (original := reader.integer("rope.scaling.original_context_length", _NON_NEGATIVE_LENGTH, 0)) > 0:
        scaling["original_max_position_embeddings"] = original
    for name in ("beta_fast", "beta_slow"):
        if f"{reader.prefix}rope.scaling.yarn_{name}" in reader.metadata:
            scaling[name] = reader.number(f"rope.scaling.yarn_{name}", POSITIVE)
    if (attn_factor := reader.number("rope.scaling.attn_factor", POSITIVE, 1.0)) != 1.0:
        # llama.cpp multiplies YaRN's own temperature by it; Hugging Face's attention_factor replaces that temperature
        scaling["attention_factor"] = attn_factor * (0.1 * math.log(factor) + 1.0)
    return scaling


def _token_ids(metadata: GGUFMetadata, vocab_size: int, *names: str) -> list[int]:
    ids = [token_id(metadata, name, vocab_size) for name in names]
    return list(dict.fromkeys(each for each in ids if each is not None))


def token_id(metadata: GGUFMetadata, name: str, vocab_size: int) -> int | None:
    """Return the id of a special token, or None if the file has none; converters also write that as 2^32 - 1."""
    found = metadata.fields.integer(f"tokenizer.ggml.{name}_token_id", Range(-1, 2**32 - 1), -1)
    return found if 0 <= found < vocab_size else None
