"""Tells the layers of an encoder's head of labels by its family: each has those of its class in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from jaxserve.errors import ConfigError
from jaxserve.model_source.architectures import ModelClass
from jaxserve.model_source.fields import NORM_EPSILON, Fields, abbreviate
from jaxserve.model_source.pooling import LayerActivation, PooledLayer, Pooling, PoolingMethod

_EUROBERT = "LlamaForCausalLM"  # The family whose layers it has
# The names of the two layers, and the activation between them
_LIKE_BERT: tuple[str, LayerActivation, str] = ("pooler.dense", "tanh", "classifier")
_LIKE_ROBERTA: tuple[str, LayerActivation, str] = ("classifier.dense", "tanh", "classifier.out_proj")
_LAYERS = {
    **dict.fromkeys(("BertModel", "GteModel", "NewModel", "NomicBertModel"), _LIKE_BERT),
    **dict.fromkeys(("CamembertModel", "MPNetModel", "RobertaModel", "XLMRobertaModel"), _LIKE_ROBERTA),
    "DistilBertModel": ("pre_classifier", "relu", "classifier"),
    _EUROBERT: ("dense", "gelu", "classifier"),
}
_POOLING: dict[str, PoolingMethod] = {"cls": "cls", "mean": "mean"}
_OF_EUROBERT: dict[str, PoolingMethod] = {"bos": "cls", "mean": "mean"}


def encoder_head(model: ModelClass, fields: Fields, width: int, labels: int) -> Pooling:
    """Return how an encoder's logits of labels are made. Raises `ConfigError`."""
    if model.family == "ModernBertModel":
        return _modernbert_head(fields, width, labels)
    first, activation, last = _LAYERS[model.family]
    method: PoolingMethod = "cls"
    if model.family == _EUROBERT:
        method = _method(fields, _OF_EUROBERT, "late")
    dense = PooledLayer(first, width, width, has_bias=True, activation=activation)
    return Pooling(method, (dense, PooledLayer(last, width, labels, has_bias=True)))


def _method(fields: Fields, methods: Mapping[str, PoolingMethod], default: str) -> PoolingMethod:
    found = fields.text("classifier_pooling", default)
    if found not in methods:
        raise ConfigError(
            f"{fields.where}: classifier_pooling={abbreviate(found)} is not supported; {' and '.join(methods)} are"
        )
    return methods[found]


def _modernbert_head(fields: Fields, width: int, labels: int) -> Pooling:
    activation = fields.text("classifier_activation", "gelu")
    found = next((each for each in get_args(LayerActivation) if each == activation), None)
    if found is None:
        raise ConfigError(f"{fields.where}: classifier_activation={abbreviate(activation)} is not supported")
    dense = PooledLayer(
        "head.dense",
        width,
        width,
        has_bias=fields.boolean("classifier_bias", False),
        activation=found,
        norm="head.norm",
        norm_has_bias=fields.boolean("norm_bias", False),
        norm_eps=fields.number("norm_eps", NORM_EPSILON, 1e-5),
    )
    return Pooling(_method(fields, _POOLING, "cls"), (dense, PooledLayer("classifier", width, labels, has_bias=True)))
