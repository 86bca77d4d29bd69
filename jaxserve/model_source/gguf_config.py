"""Makes a config in Hugging Face's form from the metadata of a GGUF file; a key that it doesn't know is an error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import (
    CONTEXT,
    EXPERTS,
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
from jaxserve.model_source.gguf_architectures import ARCHITECTURES
from jaxserve.model_source.gguf_metadata import GGUFMetadata, Scalar
from jaxserve.model_source.gguf_pooling import pooling_of_gguf
from jaxserve.model_source.gguf_row import Architecture

# A file has the epsilons of both kinds of norms if its config.json had both; what is made of the model's hidden states
# is read apart
_HARMLESS_KEYS = (
    "vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.layer_norm_", "pooling_type",
    "classifier.output_labels",
)  # fmt: skip
_NON_NEGATIVE_LENGTH = Range(0, CONTEXT.most)
_COUNT = Range(0, WIDTH.most)

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Divisors of frequencies: part of the config rather than weights."""


def config_from_gguf(metadata: GGUFMetadata) -> dict[str, Any]:
    """Return the config.json that the model would have. Raise `ConfigError` naming the architecture or key at fault.

    A GGUF file stores Llama 3's scaled frequencies as a tensor of divisors, `rope_freqs.weight`. They become
    `{"rope_type": "factors", "factors": [...]}`: frequency i is divided by factor i.
    """
    row = architecture_of(metadata)
    keys = _ArchitectureKeys(metadata)
    if "token_embd.weight" not in metadata.tensors:
        raise ConfigError(f"{metadata.path} has no tensor token_embd.weight: it isn't a complete model")
    embedding = metadata.tensors["token_embd.weight"].shape
    if len(embedding) != 2:
        raise ConfigError(f"{metadata.path}: tensor token_embd.weight has {len(embedding)} dimensions instead of 2")
    hidden_size, (num_heads, num_kv_heads) = keys.integer("embedding_length", WIDTH), head_counts(metadata)
    latent = _latent(keys) if row.latent else {}
    head_dim = latent.get("qk_rope_head_dim") or keys.integer(
        "attention.key_length", HEAD_DIM, hidden_size // num_heads
    )
    num_layers, drafts = _layer_counts(keys, row)
    windows = _windows(keys, row, num_layers)
    class_name, model_type = row.windowed_model if windows and row.windowed_model else row.model
    epsilon_key, epsilon = row.norm_epsilon
    bos_ids = _token_ids(metadata, embedding[0], "bos")
    eos_ids = _token_ids(metadata, embedding[0], "eos", "eot", "eom")
    config = {
        **row.constants,
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": embedding[0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length", WIDTH, row.constants.get("intermediate_size")),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads if latent else num_kv_heads,
        "head_dim": head_dim,
        **latent,
        epsilon: keys.number(epsilon_key, NORM_EPSILON),
        "rope_parameters": _rope_parameters(keys, row, head_dim, windowed=bool(windows)),
        "max_position_embeddings": keys.integer("context_length", CONTEXT),
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        **_present(metadata, row, row.biases, "bias"),
        **_present(metadata, row, row.norms, "weight"),
        **{field: keys.number(key, POSITIVE) for key, field in row.numbers.items() if key in keys},
        **{field: keys.integer(key, _range(key), row.constants.get(field)) for key, field in row.integers.items()},
        **{field: keys.boolean(key, row.constants[field]) for key, field in row.flags.items()},
        **({row.drafts: drafts} if row.drafts else {}),
        **_rows(metadata, row.tables),
        **({} if row.causal else {"pooling": pooling_of_gguf(metadata)}),
        **windows,
        "bos_token_id": bos_ids[0] if bos_ids else None,
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids or None,
    }
    if not latent:
        keys.equal("attention.value_length", head_dim)
    keys.equal("attention.causal", row.causal)
    for key, value in row.only.items():
        keys.equal(key, value)
    keys.refuse_unread(row.ignored)
    return {**config, **row.implied(config)}


def _rows(metadata: GGUFMetadata, tables: Mapping[str, str]) -> dict[str, int]:
    """Return the fields that count the rows of tables, 0 for one that isn't there."""
    found = {field: metadata.tensors.get(f"{table}.weight") for table, field in tables.items()}
    return {field: tensor.shape[0] if tensor is not None and tensor.shape else 0 for field, tensor in found.items()}


def _latent(keys: _ArchitectureKeys) -> dict[str, int | None]:
    """Return the sizes of latent attention."""
    rank, rotated = keys.integer("attention.kv_lora_rank", WIDTH), keys.integer("rope.dimension_count", HEAD_DIM)
    suffix = ""
    if "attention.key_length_mla" in keys:
        suffix = "_mla"
        keys.equal("attention.key_length", rank + rotated)
        keys.equal("attention.value_length", rank)
    query = keys.integer(f"attention.key_length{suffix}", Range(rotated + HEAD_DIM.least, HEAD_DIM.most))
    return {
        "q_lora_rank": keys.integer("attention.q_lora_rank", WIDTH) if "attention.q_lora_rank" in keys else None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": query - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": keys.integer(f"attention.value_length{suffix}", HEAD_DIM),
    }


def architecture_of(metadata: GGUFMetadata) -> Architecture:
    """Return the row of a file's architecture. Raise `ConfigError` if it isn't supported."""
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{metadata.path}: GGUF architecture {abbreviate(name)} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    row = ARCHITECTURES[str(name)]
    has_experts = row.mixture is not None and metadata.fields.integer(f"{name}.expert_count", _COUNT, 0) > 0
    return row.mixture if row.mixture is not None and has_experts else row


def head_counts(metadata: GGUFMetadata) -> tuple[int, int]:
    """Return the number of query heads and the number of KV heads."""
    keys = _ArchitectureKeys(metadata)
    heads = keys.integer("attention.head_count", HEADS)
    return heads, keys.integer("attention.head_count_kv", HEADS, heads)


def layer_counts(metadata: GGUFMetadata) -> tuple[int, int]:
    """Return how many layers a model has, and how many more, after these, draft for it."""
    return _layer_counts(_ArchitectureKeys(metadata), architecture_of(metadata))


def _layer_counts(keys: _ArchitectureKeys, row: Architecture) -> tuple[int, int]:
    layers = keys.integer("block_count", LAYERS)
    drafts = keys.integer("nextn_predict_layers", Range(0, layers - 1), 0) if row.drafts else 0
    return layers - drafts, drafts


def delta_sizes(metadata: GGUFMetadata) -> tuple[int, int, int, int]:
    """Return the key heads and value heads of gated delta nets, and the sizes of their heads."""
    keys = _ArchitectureKeys(metadata)
    key_heads, heads = (keys.integer(key, HEADS) for key in ("ssm.group_count", "ssm.time_step_rank"))
    return key_heads, heads, keys.integer("ssm.state_size", HEAD_DIM), keys.integer("ssm.inner_size", WIDTH) // heads


class _ArchitectureKeys:
    """The keys under the architecture's name. An array with an element per layer is one value if all are equal."""

    def __init__(self, metadata: GGUFMetadata) -> None:
        self.metadata = metadata
        self.prefix = f"{metadata.get('general.architecture')}."
        self._read = {"attention.head_count", "attention.head_count_kv"}

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.metadata

    def number(self, name: str, allowed: Range, default: float | None = None) -> float:
        return self._fields(name).number(self.prefix + name, allowed, default)

    def integer(self, name: str, allowed: Range, default: int | None = None) -> int:
        return self._fields(name).integer(self.prefix + name, allowed, default)

    def boolean(self, name: str, default: bool) -> bool:
        return self._fields(name).boolean(self.prefix + name, default)

    def text(self, name: str, default: str) -> str:
        return self._fields(name).text(self.prefix + name, default)

    def array(self, name: str) -> list[Scalar] | None:
        self._read.add(name)
        return self.metadata.array(self.prefix + name)

    def equal(self, name: str, only: Scalar) -> None:
        """Raise `ConfigError` if a key is there with any other value."""
        found = self._fields(name).get(self.prefix + name, only)
        if found != only:
            raise ConfigError(
                f"{self.metadata.path}: {self.prefix}{name} = {abbreviate(found)} is not supported; only {only!r} is"
            )

    def refuse_unread(self, ignored: tuple[str, ...]) -> None:
        """Raise `ConfigError` for a key that nothing has read; zero and false mean that a feature is off."""
        for key in self.metadata:
            name, value = key.removeprefix(self.prefix), self.metadata.get(key)
            if name == key or name in self._read or name.startswith((*_HARMLESS_KEYS, *ignored)):
                continue
            if value is None or value:
                raise ConfigError(
                    f"{self.metadata.path}: key {key} = {abbreviate(value)} is not supported for GGUF files of "
                    f"architecture {self.prefix[:-1]}"
                )

    def _fields(self, name: str) -> Fields:
        key = self.prefix + name
        per_layer = self.array(name)
        if per_layer is None:
            return self.metadata.fields
        if len(set(per_layer)) != 1:
            raise ConfigError(
                f"{self.metadata.path}: {key} differs between layers, which is not supported: {abbreviate(per_layer)}"
            )
        return Fields({key: per_layer[0]}, self.metadata.fields.where)


def _windows(keys: _ArchitectureKeys, row: Architecture, num_layers: int) -> dict[str, Any]:
    """Return the window and the layers that have it; empty if there is none."""
    if not row.window_period:
        return {}
    window = keys.integer("attention.sliding_window", _NON_NEGATIVE_LENGTH, 0)
    listed = keys.array("attention.sliding_window_pattern")
    period = row.window_period
    if listed is None:
        period = keys.integer("attention.sliding_window_pattern", LAYERS, period)
    if not window:
        return {}
    if period == 1 and listed is None:
        return {"sliding_window": window}
    first = 0 if row.full_first else 1
    sliding = [bool((i + first) % period) for i in range(num_layers)] if listed is None else listed
    if len(sliding) != num_layers:
        raise ConfigError(
            f"{keys.metadata.path}: {keys.prefix}attention.sliding_window_pattern has {len(sliding)} elements for "
            f"{num_layers} layers"
        )
    return {
        "sliding_window": window,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in sliding],
    }


def _range(key: str) -> Range:
    return EXPERTS if key in ("expert_count", "expert_used_count") else _COUNT


def _present(
    metadata: GGUFMetadata, row: Architecture, fields: Mapping[str, tuple[str, ...]], kind: str
) -> dict[str, bool]:
    """Return the fields that tell which tensors a layer has; the first layer shows it."""
    found = {}
    for field, parts in fields.items():
        present = [part for part in parts if f"blk.0.{part}.{kind}" in metadata.tensors]
        if present and len(present) < len(parts):
            raise ConfigError(
                f"{metadata.path}: a {kind} of {', '.join(present)} alone is not supported for {row.model[1]}: it has "
                f"one on all of {', '.join(parts)} or on none"
            )
        found[field] = bool(present)
    return found


def _rope_parameters(keys: _ArchitectureKeys, row: Architecture, head_dim: int, *, windowed: bool) -> dict[str, Any]:
    """Return the rotation, or one for each type of layers."""
    theta = keys.number("rope.freq_base", ROPE_THETA, 10000.0)
    rope = {"rope_theta": theta, "rope_type": "default", **_scaling(keys, row)}
    rope |= {field: keys.number(key, NON_NEGATIVE) for key, field in row.rope_numbers.items() if key in keys}
    if row.partial_rotation:
        rope["partial_rotary_factor"] = keys.integer("rope.dimension_count", HEAD_DIM, head_dim) / head_dim
    else:
        keys.equal("rope.dimension_count", head_dim)
    if row.local_theta is None:
        return rope
    local_theta = keys.number("rope.freq_base_swa", ROPE_THETA, row.local_theta or theta)
    local = {"rope_theta": local_theta, "rope_type": "default"}
    return {"full_attention": rope, "sliding_attention": local} if windowed else rope


def _scaling(keys: _ArchitectureKeys, row: Architecture) -> dict[str, Any]:
    """Return how the frequencies are scaled, as fields of `rope_parameters`; empty if they aren't."""
    factor = keys.number("rope.scaling.factor", NON_NEGATIVE, keys.number("rope.scale_linear", NON_NEGATIVE, 1.0))
    kind = keys.text("rope.scaling.type", "none" if factor in (0.0, 1.0) else "linear")
    original = keys.integer("rope.scaling.original_context_length", _NON_NEGATIVE_LENGTH, 0)
    more = keys.number("rope.scaling.attn_factor", POSITIVE, 1.0)
    yarn = _yarn(keys, row, factor, more)
    stretched = {"original_max_position_embeddings": original} if original else {}
    files, names = keys.metadata, [name for name in ROPE_TENSORS if name in keys.metadata.tensors]
    if names == ["rope_freqs.weight"] and kind in ("none", "llama3"):
        return {"rope_type": "factors", "factors": files.float32_tensor(names[0])}
    if names == ["rope_factors_long.weight", "rope_factors_short.weight"] and kind in ("none", "longrope"):
        long, short = map(files.float32_tensor, names)
        scale = {"attention_factor": more, **stretched}
        return {"rope_type": "longrope", "long_factor": long, "short_factor": short, **scale}
    if names or kind not in ("none", "linear", "yarn"):
        found = " and ".join(names) or "no tensor of divisors"
        raise ConfigError(f"{files.path}: rope scaling {kind!r} with {found} is not supported")
    if kind == "yarn":
        if factor not in ROPE_FACTOR:
            raise files.fields.error(f"{keys.prefix}rope.scaling.factor", f"a number in {ROPE_FACTOR}")
        return {"rope_type": "yarn", "factor": factor, **yarn, **stretched}
    keys.equal("rope.scaling.attn_factor", 1.0)
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor not in (0.0, 1.0) else {}


def _yarn(keys: _ArchitectureKeys, row: Architecture, factor: float, more: float) -> dict[str, float]:
    """Return the fields of YaRN that a file sets; `more` is its `attn_factor`."""
    keys.equal("rope.scaling.yarn_ext_factor", 1.0)
    options = {
        "attention_factor": "rope.scaling.yarn_attn_factor",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
    }
    fields = {field: keys.number(key, POSITIVE) for field, key in options.items() if key in keys}
    reduction = keys.number("rope.scaling.yarn_log_multiplier", NON_NEGATIVE, 0.0)
    if reduction:
        fields |= {"mscale": 1.0, "mscale_all_dim": reduction}
    if more != 1.0:
        # llama.cpp multiplies YaRN's own temperature by it; Hugging Face's attention_factor replaces that temperature
        log = 0.0 if row.whole_yarn_factor else 0.1 * math.log(max(factor, 1.0))
        fields.setdefault("attention_factor", more * (1.0 + log) / (1.0 + reduction * log))
    return fields


def _token_ids(metadata: GGUFMetadata, vocab_size: int, *names: str) -> list[int]:
    ids = [token_id(metadata, name, vocab_size) for name in names]
    return list(dict.fromkeys(each for each in ids if each is not None))


def token_id(metadata: GGUFMetadata, name: str, vocab_size: int) -> int | None:
    """Return the id of a special token, or None if the file has none; converters also write that as 2^32 - 1.

    Raises `ConfigError` for an end token that the model doesn't have.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    found = metadata.fields.integer(key, Range(-1, 2**32 - 1), -1)
    if name in ("eos", "eot", "eom") and vocab_size <= found < 2**32 - 1:
        raise metadata.fields.error(key, f"below the number of tokens, {vocab_size}")
    return found if 0 <= found < vocab_size else None
