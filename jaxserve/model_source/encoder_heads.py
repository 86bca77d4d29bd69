"""Tells the layers of an encoder's head of labels by its family: each has those of its class in transformers."""

from __future__ import annotations

from typing import get_args

from jaxserve.errors import ConfigError
from jaxserve.model_source.architectures import ModelClass
from jaxserve.model_source.fields import NORM_EPSILON, Fields, abbreviate
from jaxserve.model_source.pooling import LayerActivation, PooledLayer, Pooling, PoolingMethod

# The names of the two layers, and the activation between them
_LIKE_BERT: tuple[str, LayerActivation, str] = ("pooler.dense", "tanh", "classifier")
_LIKE_ROBERTA: tuple[str, LayerActivation, str] = ("classifier.dense", "tanh", "classifier.out_proj")
_LAYERS = {
    **dict.fromkeys(("BertModel", "GteModel", "NewModel", "NomicBertModel"), _LIKE_BERT),
    **dict.fromkeys(("CamembertModel", "MPNetModel", "RobertaModel", "XLMRobertaModel"), _LIKE_ROBERTA),
    "DistilBertModel": ("pre_classifier", "relu", "classifier"),
}
_POOLING: dict[str, PoolingMethod] = {"cls": "cls", "mean": "mean"}
_EUROBERT = "EuroBertForSequenceClassification"
_EUROBERT_POOLING: dict[str, PoolingMethod] = {"bos": "cls", "mean": "mean"}


def has_encoder_head(model: ModelClass) -> bool:
    """Return whether a model with a head of labels has that of an encoder, as EuroBERT's has on a decoder's layers."""
    return model.is_encoder or model.name == _EUROBERT


def encoder_head(model: ModelClass, fields: Fields, width: int, labels: int) -> Pooling:
    """Return how an encoder's logits of labels are made. Raises `ConfigError`."""
    if model.family == "ModernBertModel":
        return _modernbert_head(fields, width, labels)
    if model.name == _EUROBERT:
        return _eurobert_head(fields, width, labels)
    first, activation, last = _LAYERS[model.family]
    dense = PooledLayer(first, width, width, has_bias=True, activation=activation)
    return Pooling("cls", (dense, PooledLayer(last, width, labels, has_bias=True)))


def _modernbert_head(fields: Fields, width: int, labels: int) -> Pooling:
    method = fields.text("classifier_pooling", "cls")
    if method not in _POOLING:
        raise fields.error("classifier_pooling", "cls or mean")
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
    return Pooling(_POOLING[method], (dense, PooledLayer("classifier", width, labels, has_bias=True)))


def _eurobert_head(fields: Fields, width: int, labels: int) -> Pooling:
    method = fields.text("classifier_pooling", "late")
    if method not in _EUROBERT_POOLING:
        raise ConfigError(
            f"{fields.where}: classifier_pooling={abbreviate(method)} is not supported; bos and mean are, which pool "
            "before the head of labels, not after it"
        )
    dense = PooledLayer("dense", width, width, has_bias=True, activation="gelu")
    return Pooling(_EUROBERT_POOLING[method], (dense, PooledLayer("classifier", width, labels, has_bias=True)))
