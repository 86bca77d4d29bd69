"""Finds the family that serves an architecture."""

from __future__ import annotations

from types import ModuleType

from jaxserve.models import llama
from jaxserve.models.config import ModelConfig

_FAMILIES: dict[str, ModuleType] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": llama,
    "Qwen2ForCausalLM": llama,
    "Qwen3ForCausalLM": llama,
}


def family(config: ModelConfig) -> ModuleType:
    """The module with `abstract, kv_specs, placements, ignored, embed, forward, head` for a parsed config."""
    return _FAMILIES[config.architecture]
