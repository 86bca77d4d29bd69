"""Parses a model's config: Hugging Face's config.json, or the same dict made from GGUF metadata.

A field that changes the mathematics in a way that isn't supported is refused by name, and so is an unknown field whose
name suggests that it does. The other unknown fields are named in a log line.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.layers.rope import RopeConfig
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

logger = logging.getLogger("jaxserve.models")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The config of a decoder of the Llama family.

    `windows[i]` is the sliding window of layer i in tokens, None for full attention. `shards` is the number of parts
    that the parameters are laid out for, which the checkpoint doesn't know: KV heads are repeated and the vocabulary is
    padded until both can be split into that number.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    shards: int = 1

    @property
    def kv_replicas(self) -> int:
        """The number of copies of each KV head, one for each shard that shares it."""
        return max(1, self.shards // self.num_kv_heads)

    @property
    def padded_vocab_size(self) -> int:
        """The rows of the embedding and of the head, over all shards."""
        return -(-self.vocab_size // self.shards) * self.shards

    def splits_into(self, shards: int) -> bool:
        """Return whether heads and the MLP can be split into `shards` parts."""
        kv = self.num_kv_heads
        even = self.num_heads % shards == self.intermediate_size % shards == 0
        return even and (kv % shards == 0 or shards % kv == 0)


_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

_SUPPORTED_FIELDS = {
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "hidden_act",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "quantization_config",
}

_HARMLESS_FIELDS = {
    "_name_or_path",
    "attention_dropout",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "hidden_dropout",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "is_llama_config",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_cache",
}

# An unknown field with one of these in its name may well change the mathematics.
_SUSPECT_WORDS = (
    "act", "alibi", "attn", "attention", "bias", "cap", "clip", "conv", "embed", "expert", "head", "hidden", "layer",
    "logit", "mlp", "moe", "mult", "norm", "parallel", "position", "quant", "residual", "rope", "rotary", "router",
    "scal", "window",
)  # fmt: skip

_ROPE_KEYS = {
    "type", "rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
    "truncate", "factors", "max_position_embeddings",
}  # fmt: skip


def parse_model_config(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Return the config of a model from its config.json, read from the file `where`.

    Raises `ConfigError` naming the field that is missing, out of range or not supported.
    """
    fields = Fields(raw, where)
    architecture = (fields.texts("architectures") or ["(none)"])[0]
    if architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"architecture {abbreviate(architecture)} is not supported; supported: {', '.join(sorted(_ARCHITECTURES))}"
        )
    family = _ARCHITECTURES[architecture]
    _refuse_unknown(raw)
    if fields.text("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act={raw['hidden_act']!r} is not supported; only 'silu' is")
    if quantization := fields.object("quantization_config"):
        method = quantization.get("quant_method", "unnamed")
        raise ConfigError(
            f"quantization_config ({abbreviate(method)}) is not supported yet; use an unquantized checkpoint or a GGUF"
        )
    heads = fields.integer("num_attention_heads", HEADS)
    hidden = fields.integer("hidden_size", WIDTH)
    kv_heads = fields.integer("num_key_value_heads", HEADS, heads)
    if heads % kv_heads:
        raise ConfigError(f"{where}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if raw.get("head_dim") is None and hidden % heads:
        raise ConfigError(f"{where}: hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
    head_dim = fields.integer("head_dim", HEAD_DIM, hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"{where}: head_dim={head_dim} is odd: rotary embedding rotates pairs of dimensions")
    layers = fields.integer("num_hidden_layers", LAYERS)
    max_position = fields.integer("max_position_embeddings", CONTEXT, 2048)
    biased = fields.boolean("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", WIDTH),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", WIDTH),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-6),
        rope=_rope(fields, max_position, head_dim),
        max_position_embeddings=max_position,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=True if family == "qwen2" else biased,
        output_bias=biased and family in ("llama", "qwen3"),
        mlp_bias=fields.boolean("mlp_bias", False),
        qk_norm=family == "qwen3",
        windows=_windows(fields, family, layers),
    )


def _refuse_unknown(raw: Mapping[str, Any]) -> None:
    unknown = [
        k
        for k in raw
        if k not in _SUPPORTED_FIELDS and k not in _HARMLESS_FIELDS and raw[k] not in (None, False, "", [], {})
    ]
    suspect = sorted(k for k in unknown if any(word in k.lower() for word in _SUSPECT_WORDS))
    if suspect:
        raise ConfigError(f"config.json has fields that jaxserve does not support: {', '.join(suspect)}")
    if unknown:
        logger.info(
            "config.json: ignored fields, assumed not to change the mathematics: %s", ", ".join(sorted(unknown))
        )


def _windows(fields: Fields, family: str, layers: int) -> tuple[int | None, ...]:
    window = fields.integer("sliding_window", CONTEXT) if fields.raw.get("sliding_window") is not None else None
    types = fields.texts("layer_types")
    if types is not None:
        odd = set(types) - {"full_attention", "sliding_attention"}
        if odd or len(types) != layers:
            raise ConfigError(
                f"layer_types {sorted(odd) or 'of another length than num_hidden_layers'} is not supported"
            )
        if "sliding_attention" in types and not window:
            raise ConfigError("layer_types asks for sliding_attention, but sliding_window is not set")
        return tuple(window if t == "sliding_attention" else None for t in types)
    if window is None or family == "llama":
        if window is not None:
            raise ConfigError(f"sliding_window={window} is not a field of the Llama architecture")
        return (None,) * layers
    if family == "mistral":
        return (window,) * layers
    if not fields.boolean("use_sliding_window", False):
        return (None,) * layers
    full = fields.integer("max_window_layers", Range(0, LAYERS.most), 28)
    return tuple(window if i >= full else None for i in range(layers))


def _rope(fields: Fields, max_position: int, head_dim: int) -> RopeConfig:
    """Return the rotary embedding: transformers 5 writes `rope_parameters`, 4 wrote `rope_theta` and `rope_scaling`."""
    raw = {**fields.object("rope_scaling"), **fields.object("rope_parameters")}
    scaling = Fields(raw, f"{fields.where}: rope scaling")
    theta = scaling.number("rope_theta", ROPE_THETA, fields.number("rope_theta", ROPE_THETA, 10000.0))
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn", "factors"):
        raise ConfigError(f"rope_type {abbreviate(kind)} is not supported; supported: default, linear, llama3, yarn")
    odd = set(raw) - _ROPE_KEYS
    if odd:
        raise ConfigError(f"rope scaling has fields that jaxserve does not support: {', '.join(sorted(odd))}")
    if scaling.number("partial_rotary_factor", POSITIVE, 1.0) != 1.0:
        raise ConfigError(f"partial_rotary_factor={raw['partial_rotary_factor']} is not supported; only 1.0 is")
    original = scaling.integer("original_max_position_embeddings", CONTEXT, max_position)
    if raw.get("factor") is not None:
        factor = scaling.number("factor", ROPE_FACTOR)
    elif kind in ("linear", "llama3"):
        raise ConfigError(f"rope_type {kind!r} needs a factor")
    else:
        factor = max_position / original
    config = RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        low_freq_factor=scaling.number("low_freq_factor", POSITIVE, 1.0),
        high_freq_factor=scaling.number("high_freq_factor", POSITIVE, 4.0),
        original_max_position=original,
        beta_fast=scaling.number("beta_fast", POSITIVE, 32.0),
        beta_slow=scaling.number("beta_slow", POSITIVE, 1.0),
        attention_factor=(
            None if raw.get("attention_factor") is None else scaling.number("attention_factor", POSITIVE)
        ),
        mscale=scaling.number("mscale", NON_NEGATIVE, 0.0),
        mscale_all_dim=scaling.number("mscale_all_dim", NON_NEGATIVE, 0.0),
        truncate=scaling.boolean("truncate", True),
        factors=tuple(scaling.numbers("factors", POSITIVE)),
    )
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        least, most = getattr(config, low), getattr(config, high)
        if least >= most:
            raise ConfigError(f"{scaling.where}: {low}={least:g} should be less than {high}={most:g}")
    if kind == "factors" and len(config.factors) != head_dim // 2:
        raise ConfigError(
            f"{scaling.where}: there are {len(config.factors)} factors; {head_dim // 2} are needed, one for "
            "each frequency"
        )
    return config
