"""Tells from the name of an architecture which family a checkpoint is of, and what it has after its last layer.

Hugging Face's classes of a family share its layers: `QwenXForCausalLM` has a head of tokens, `QwenXModel` none,
`QwenXForSequenceClassification` one of labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import Fields

Head = Literal["tokens", "none", "labels", "reward"]

_TOKENS, _MULTIMODAL = "ForCausalLM", "ForConditionalGeneration"
# Of the classes for reward models, only Qwen2's is one of several checkpoints: two layers, with a ReLU between them
_HEADS: dict[str, Head] = {"ForSequenceClassification": "labels", "ForRewardModel": "reward", "Model": "none"}
_REWARD_MODELS = ("Qwen2ForRewardModel",)
_PER_TOKEN = ("ForTokenClassification", "ForProcessRewardModel", "ForQuestionAnswering")


class ModelClass(NamedTuple):
    """An architecture as its `name` says: the class of its family that has a head of tokens, and its own `head`."""

    name: str
    generative: str
    head: Head


def model_class_of(raw: Mapping[str, Any], where: str) -> ModelClass:
    """Return the architecture of a config.json. Raises `ConfigError` for one with a head for each token."""
    name = (Fields(raw, where).texts("architectures") or ["(none)"])[0]
    if name.endswith(_PER_TOKEN):
        raise ConfigError(
            f"{where}: architecture {name} has a head that labels each token, which is not supported yet; heads for a "
            "whole sequence are (ForSequenceClassification, ForRewardModel)"
        )
    suffix = next((suffix for suffix in _HEADS if name.endswith(suffix)), None)
    if suffix is None or (suffix == "ForRewardModel" and name not in _REWARD_MODELS):
        return ModelClass(name, name, "tokens")
    stem = name.removesuffix(suffix)
    generative = stem + _MULTIMODAL if raw.get("text_config") else stem.removesuffix("Text") + _TOKENS
    return ModelClass(name, generative, _HEADS[suffix])
