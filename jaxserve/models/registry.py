"""Maps each supported architecture to the model family that implements it.

A family's module has `parse(fields) -> config`, `abstract(config, dtype)`, `embed(config, params, batch)`,
`forward(config, params, x, batch, kv, backend)` and `head(config, params, hidden)`; docs/adding-a-model.md shows one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import Fields, abbreviate
from jaxserve.models import cohere, gemma, llama
from jaxserve.models.config import ModelConfig, read_quantization, refuse_unread

_FAMILIES: dict[str, ModuleType] = {
    "Cohere2ForCausalLM": cohere,
    "Gemma2ForCausalLM": gemma,
    "Gemma3ForCausalLM": gemma,
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": llama,
    "Qwen2ForCausalLM": llama,
    "Qwen3ForCausalLM": llama,
}

# Models with an encoder of images besides: the text model's architecture. Their own config is in `text_config`.
_TEXT_MODELS: dict[str, str] = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
}

_TOWERS = ("vision_tower.", "multi_modal_projector.", "vision_model.", "audio_tower.", "embed_vision.")


def parse_model_config(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Return the config of a model from its config.json, read from the file `where`.

    Raises `ConfigError` naming the architecture or the field that is missing, out of range or not supported.
    """
    fields = Fields(raw, where)
    architecture = (fields.texts("architectures") or ["(none)"])[0]
    read_quantization(fields)
    if architecture in _TEXT_MODELS:
        architecture = _TEXT_MODELS[architecture]
        text = {**fields.object("text_config"), "architectures": [architecture]}
        # Whether the head is tied stands beside the parts, where it differs from the default
        text.setdefault("tie_word_embeddings", fields.get("tie_word_embeddings"))
        fields = Fields(text, f"{where}: text_config")
        read_quantization(fields)
    if architecture not in _FAMILIES:
        supported = ", ".join(sorted([*_FAMILIES, *_TEXT_MODELS]))
        raise ConfigError(f"architecture {abbreviate(architecture)} is not supported; supported: {supported}")
    config: ModelConfig = _FAMILIES[architecture].parse(fields)
    refuse_unread(fields)
    return config


def family(config: ModelConfig) -> ModuleType:
    """Return the module of a config's family."""
    return _FAMILIES[config.architecture]


def is_ignored(name: str) -> bool:
    """Return whether a checkpoint tensor is not needed: frequencies, which are computed, the copy of a tied head, or an
    encoder of images, which are refused."""
    own = name.removeprefix("model.")
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight" or own.startswith(_TOWERS)
