"""Maps each supported architecture to the model family that implements it."""

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
    """Return the module with `abstract, kv_specs, tensor_mappings, ignored, embed, forward, head` for a config."""
    return _FAMILIES[config.architecture]
