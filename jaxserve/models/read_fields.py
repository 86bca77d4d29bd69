"""Reads the fields that config.json has in most families, and refuses fields that a family doesn't read.

A family reads each field that it knows. A field that it doesn't read is refused if its name suggests that it changes
the mathematics; the others are named in a log line.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypedDict

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import CONTEXT, EXPERTS, HEAD_DIM, HEADS, LAYERS, WIDTH, Fields, Range, abbreviate

logger = logging.getLogger("jaxserve.models")

DRAFTS = Range(0, 64)
SLIDING, FULL = "sliding_attention", "full_attention"


class ConfigSizes(TypedDict):
    """The fields of `ModelConfig` that all families read alike."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool


def read_sizes(fields: Fields, **defaults: int) -> ConfigSizes:
    """Read the sizes; `defaults` are values by field name that the family's checkpoints may leave out.

    Raises `ConfigError` naming the field that is missing, out of range or doesn't fit another.
    """
    where = fields.where
    heads = fields.integer("num_attention_heads", HEADS, defaults.get("num_attention_heads"))
    hidden = fields.integer("hidden_size", WIDTH, defaults.get("hidden_size"))
    kv_heads = fields.integer("num_key_value_heads", HEADS, defaults.get("num_key_value_heads", heads))
    if heads % kv_heads:
        raise ConfigError(f"{where}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if fields.raw.get("head_dim") is None and "head_dim" not in defaults and hidden % heads:
        raise ConfigError(f"{where}: hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
    head_dim = fields.integer("head_dim", HEAD_DIM, defaults.get("head_dim", hidden // heads))
    if head_dim % 2:
        raise ConfigError(f"{where}: head_dim={head_dim} is odd: rotary embedding rotates pairs of dimensions")
    return ConfigSizes(
        architecture=(fields.texts("architectures") or ["(none)"])[0],
        vocab_size=fields.integer("vocab_size", WIDTH, defaults.get("vocab_size")),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", WIDTH, defaults.get("intermediate_size")),
        num_layers=fields.integer("num_hidden_layers", LAYERS, defaults.get("num_hidden_layers")),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer(
            "max_position_embeddings", CONTEXT, defaults.get("max_position_embeddings", 2048)
        ),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", bool(defaults.get("tie_word_embeddings", False))),
    )


def read_windows(
    fields: Fields, num_layers: int, default_types: Sequence[str], default_window: int | None = None
) -> tuple[int | None, ...]:
    """Return each layer's sliding window from `sliding_window` and `layer_types`, by default `default_types`.

    A layer whose default type is sliding has full attention if the checkpoint sets no window.
    """
    unset = fields.raw.get("sliding_window", default_window) is None
    window = None if unset else fields.integer("sliding_window", CONTEXT, default_window)
    types = fields.texts("layer_types")
    if types is None:
        return tuple(window if kind == SLIDING else None for kind in default_types)
    if odd := set(types) - {SLIDING, FULL}:
        raise ConfigError(f"{fields.where}: layer_types with {', '.join(sorted(odd))} are not supported")
    if len(types) != num_layers:
        raise ConfigError(f"{fields.where}: there are {len(types)} layer_types; num_hidden_layers is {num_layers}")
    if SLIDING in types and window is None:
        raise ConfigError(f"{fields.where}: layer_types asks for {SLIDING}, but sliding_window is not set")
    return tuple(window if kind == SLIDING else None for kind in types)


def read_one_window(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Return the window of a family whose layers all have it; `layer_types` may say nothing else."""
    windows = read_windows(fields, num_layers, [SLIDING] * num_layers)
    if None in windows and fields.get("sliding_window") is not None:
        raise ConfigError(
            f"{fields.where}: layer_types with {FULL} is not supported for this architecture: all its layers have "
            "sliding_window, if it is set"
        )
    return windows


def read_experts(
    fields: Fields, experts: str, choices: str, *, default: tuple[int | None, int | None] = (None, None)
) -> tuple[int, int]:
    """Return the number of experts and how many of them a token chooses. Raises `ConfigError`."""
    count, chosen = (fields.integer(name, EXPERTS, size) for name, size in zip((experts, choices), default))
    if chosen > count:
        raise ConfigError(f"{fields.where}: {choices}={chosen} is more than {experts}={count}")
    for name in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"):
        fields.get(name)  # They are for training
    return count, chosen


def read_dense(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return which layers of a mixture of Qwen's have a plain feed-forward block."""
    every = fields.integer("decoder_sparse_step", LAYERS, 1)
    plain = {int(i) for i in fields.numbers("mlp_only_layers", Range(0, LAYERS.most))}
    return tuple(i in plain or (i + 1) % every != 0 for i in range(num_layers))


def unused_layers(num_layers: int, drafts: int) -> tuple[str, ...]:
    """Return prefixes of the tensors of layers that draft several tokens at once, which follow the model's layers."""
    return tuple(f"model.layers.{num_layers + i}." for i in range(max(1, drafts)))


def periodic_layer_types(period: int, num_layers: int) -> list[str]:
    """Return the types of layers: each `period`-th has full attention, the others have a window."""
    return [SLIDING if (i + 1) % period else FULL for i in range(num_layers)]


def refuse(fields: Fields, **only: Any) -> None:
    """Raise `ConfigError` for a field whose value isn't the only one that is supported (None: it must not be set)."""
    for name, value in only.items():
        found = fields.get(name, value)
        if found != value or isinstance(found, bool) != isinstance(value, bool):
            supported = "it should not be set" if value is None else f"only {value!r} is"
            raise ConfigError(f"{fields.where}: {name}={abbreviate(found)} is not supported; {supported}")


_HARMLESS_FIELDS = {
    "_attn_implementation",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "classifier_from_token",
    "dtype",
    "embd_pdrop",
    "embedding_dropout",
    "eos_token_id",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_causal",
    "is_decoder",
    "is_encoder_decoder",
    "is_llama_config",
    "is_original_qwen3_reranker",
    "label2id",
    "matryoshka_dimensions",
    "method",
    "model_type",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "resid_pdrop",
    "residual_dropout",
    "return_dict",
    "sbert_ce_default_activation_function",
    "sentence_transformers",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_cache",
}

# An unknown field with one of these in its name may well change the mathematics.
_SUSPECT_WORDS = (
    "act", "alibi", "attn", "attention", "bias", "cap", "clip", "conv", "embed", "expert", "head", "hidden", "layer",
    "logit", "mamba", "mlp", "moe", "mult", "norm", "parallel", "position", "quant", "residual", "rope", "rotary",
    "router", "scal", "window",
)  # fmt: skip


def refuse_unread(fields: Fields) -> None:
    """Raise `ConfigError` for fields that the family didn't read and that may change the mathematics."""
    unread = [k for k, v in fields.raw.items() if k not in fields.read and v not in (None, False, "", [], {})]
    unknown = sorted(k for k in unread if k not in _HARMLESS_FIELDS)
    suspect = [k for k in unknown if any(word in k.lower() for word in _SUSPECT_WORDS)]
    if suspect:
        raise ConfigError(f"{fields.where} has fields that jaxserve does not support: {', '.join(suspect)}")
    if unknown:
        logger.info("%s: ignored fields, assumed not to change the mathematics: %s", fields.where, ", ".join(unknown))
