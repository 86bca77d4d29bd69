"""Tells from the name of an architecture which family a checkpoint is of, and what it has after its last layer.

Hugging Face's classes of a family share its layers: `QwenXForCausalLM` has a head of tokens, `QwenXModel` none,
`QwenXForSequenceClassification` one of labels. Encoders have no class with a head of tokens that they draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import Fields

Head = Literal["tokens", "none", "labels", "reward", "vectors of tokens"]

_TOKENS, _MULTIMODAL = "ForCausalLM", "ForConditionalGeneration"
# Of the classes for reward models, only Qwen2's is one of several checkpoints: two layers, with a ReLU between them
_HEADS: dict[str, Head] = {"ForSequenceClassification": "labels", "ForRewardModel": "reward", "Model": "none"}
_REWARD_MODELS = ("Qwen2ForRewardModel",)
# Encoders: their classes without this ending are the names of their families. Heads that guess masked tokens are unused
_ENCODERS = (
    "Bert", "Camembert", "DistilBert", "Gte", "MPNet", "ModernBert", "New", "NomicBert", "Roberta", "XLMRoberta",
)  # fmt: skip
_MASKED = ("ForMaskedLM", "ForPreTraining")
_COLBERT = "HF_ColBERT"
# Bidirectional models with the layers of a decoder
_AS_DECODERS = {"EuroBert": "LlamaForCausalLM", "LlamaBidirectional": "LlamaForCausalLM"}
_EUROBERT = "EuroBert"
_PER_TOKEN = ("ForTokenClassification", "ForProcessRewardModel", "ForQuestionAnswering")


class ModelClass(NamedTuple):
    """An architecture as its `name` says: the class by which its `family` is known, and its own `head`.

    That class is the one with a head of tokens, or an encoder without a head. In a `bidirectional` model, tokens see
    those after them, too.
    """

    name: str
    family: str
    head: Head
    is_encoder: bool = False
    bidirectional: bool = False


def model_class_of(raw: Mapping[str, Any], where: str) -> ModelClass:
    """Return the architecture of a config.json. Raises `ConfigError` for one with a head for each token."""
    name = (Fields(raw, where).texts("architectures") or ["(none)"])[0]
    if name.endswith(_PER_TOKEN):
        raise ConfigError(
            f"{where}: architecture {name} has a head that labels each token, which is not supported yet; heads for a "
            "whole sequence are (ForSequenceClassification, ForRewardModel)"
        )
    suffix = next((suffix for suffix in (*_HEADS, *_MASKED) if name.endswith(suffix)), "")
    stem, head = name.removesuffix(suffix), _HEADS.get(suffix, "none")
    if name == _COLBERT:
        return ModelClass(name, "BertModel", "vectors of tokens", is_encoder=True, bidirectional=True)
    if suffix and stem in _ENCODERS:
        return ModelClass(name, f"{stem}Model", head, is_encoder=True, bidirectional=True)
    if suffix and stem in _AS_DECODERS:
        return ModelClass(name, _AS_DECODERS[stem], head, is_encoder=stem == _EUROBERT, bidirectional=True)
    bidirectional = _is_bidirectional(raw)
    if suffix not in _HEADS or (suffix == "ForRewardModel" and name not in _REWARD_MODELS):
        return ModelClass(name, name, "tokens", bidirectional=bidirectional)
    family = stem + _MULTIMODAL if raw.get("text_config") else stem.removesuffix("Text") + _TOKENS
    return ModelClass(name, family, head, bidirectional=bidirectional)


def _is_bidirectional(raw: Mapping[str, Any]) -> bool:
    """Return whether a config, or that of its text model, says that tokens see those after them."""
    text = raw.get("text_config")
    places = (raw, text) if isinstance(text, Mapping) else (raw,)
    return any(
        each.get("is_causal") is False or each.get("use_bidirectional_attention") in (True, "all") for each in places
    )
