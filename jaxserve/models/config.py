"""What a model is, read from Hugging Face's config.json (or the same dict made from GGUF metadata).

A field that changes the mathematics and isn't built is refused by name. Fields that are neither known nor plainly
harmless are refused too; the rest are named in a log line.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.layers.rope import RopeConfig

logger = logging.getLogger("jaxserve.models")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family. `windows[i]` is the sliding window of layer i, None where it sees everything.

    `shards` is how many parts it is laid out for, and not the checkpoint's: KV heads are repeated and the vocabulary is
    padded until they can be split into so many.
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
        """How many times each KV head stands, for shards that share it."""
        return max(1, self.shards // self.num_kv_heads)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and the head, over all shards."""
        return -(-self.vocab_size // self.shards) * self.shards

    def splits_into(self, shards: int) -> bool:
        """Whether heads and the MLP can be split into so many parts."""
        kv = self.num_kv_heads
        even = self.num_heads % shards == self.intermediate_size % shards == 0
        return even and (kv % shards == 0 or shards % kv == 0)


_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

_READ = {
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

_HARMLESS = {
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

# A field with one of these in its name may well change the mathematics.
_SUSPECT = (
    "act", "alibi", "attn", "attention", "bias", "cap", "clip", "conv", "embed", "expert", "head", "hidden", "layer",
    "logit", "mlp", "moe", "mult", "norm", "parallel", "position", "quant", "residual", "rope", "rotary", "router",
    "scal", "window",
)  # fmt: skip

_ROPE_KEYS = {
    "type", "rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
    "truncate", "factors", "max_position_embeddings",
}  # fmt: skip


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json. Raises `ConfigError` naming what is missing or can't be served."""
    architectures = raw.get("architectures") or ["(none)"]
    architecture = architectures[0]
    if architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(sorted(_ARCHITECTURES))}"
        )
    family = _ARCHITECTURES[architecture]
    _refuse_unknown(raw)
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act={raw['hidden_act']!r} is not supported; only 'silu' is")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unnamed")
        raise ConfigError(
            f"quantization_config ({method}) is not supported yet; use an unquantized checkpoint or a GGUF"
        )
    heads = _positive(raw, "num_attention_heads")
    hidden = _positive(raw, "hidden_size")
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    layers = _positive(raw, "num_hidden_layers")
    max_position = raw.get("max_position_embeddings") or 2048
    biased = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw, max_position),
        max_position_embeddings=max_position,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=True if family == "qwen2" else biased,
        output_bias=biased and family in ("llama", "qwen3"),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        windows=_windows(raw, family, layers),
    )


def _positive(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {name} must be a positive integer, got {value!r}")
    return value


def _refuse_unknown(raw: Mapping[str, Any]) -> None:
    unknown = [k for k in raw if k not in _READ and k not in _HARMLESS and raw[k] not in (None, False, "", [], {})]
    suspect = sorted(k for k in unknown if any(word in k.lower() for word in _SUSPECT))
    if suspect:
        raise ConfigError(f"config.json has fields that jaxserve does not support: {', '.join(suspect)}")
    if unknown:
        logger.info("config.json: fields taken as not changing the mathematics: %s", ", ".join(sorted(unknown)))


def _windows(raw: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    types = raw.get("layer_types")
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
    if not raw.get("use_sliding_window", False):
        return (None,) * layers
    full = raw.get("max_window_layers", 28)
    return tuple(window if i >= full else None for i in range(layers))


def _rope(raw: Mapping[str, Any], max_position: int) -> RopeConfig:
    """transformers 5 writes `rope_parameters`; 4 wrote `rope_theta` beside `rope_scaling`."""
    scaling = dict(raw.get("rope_scaling") or {})
    scaling.update(raw.get("rope_parameters") or {})
    theta = float(scaling.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn", "factors"):
        raise ConfigError(f"rope_type {kind!r} is not supported; supported: default, linear, llama3, yarn")
    odd = set(scaling) - _ROPE_KEYS
    if odd:
        raise ConfigError(f"rope scaling has fields that jaxserve does not support: {', '.join(sorted(odd))}")
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"partial_rotary_factor={scaling['partial_rotary_factor']} is not supported; only 1.0 is")
    original = int(scaling.get("original_max_position_embeddings") or max_position)
    factor = scaling.get("factor")
    if factor is None:
        if kind in ("linear", "llama3"):
            raise ConfigError(f"rope_type {kind!r} needs a factor")
        factor = max_position / original
    attention_factor = scaling.get("attention_factor")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(factor),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_position=original,
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        mscale=float(scaling.get("mscale") or 0.0),
        mscale_all_dim=float(scaling.get("mscale_all_dim") or 0.0),
        truncate=bool(scaling.get("truncate", True)),
        factors=tuple(float(f) for f in scaling.get("factors", ())),
    )
