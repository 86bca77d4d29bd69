"""Reads from a GGUF file how llama.cpp pools hidden states, and what layers it has after that."""

from __future__ import annotations

from typing import Literal

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import Range
from jaxserve.model_source.gguf_metadata import GGUFMetadata
from jaxserve.model_source.pooling import LayerActivation, PooledLayer

GGUFPooling = Literal["none", "mean", "cls", "last", "rank"]
_TYPES: tuple[GGUFPooling, ...] = ("none", "mean", "cls", "last", "rank")


def pooling_of_gguf(metadata: GGUFMetadata) -> GGUFPooling:
    """Return how llama.cpp pools hidden states of the model; `rank` is for rerankers. Raises `ConfigError`."""
    key = f"{metadata.get('general.architecture')}.pooling_type"
    return _TYPES[metadata.fields.integer(key, Range(0, len(_TYPES) - 1), 0)]


def dense_layers(metadata: GGUFMetadata) -> tuple[PooledLayer, ...]:
    """Return EmbeddingGemma's layers after pooling, if the file has them."""
    return tuple(_layer(metadata, name) for name in ("dense_2", "dense_3") if f"{name}.weight" in metadata.tensors)


def label_layers(metadata: GGUFMetadata) -> tuple[PooledLayer, ...]:
    """Return an encoder's head of labels, RoBERTa's or DistilBERT's, which has no token types.

    Raises `ConfigError` if the converter left out a part of it.
    """
    if not all(f"{name}.weight" in metadata.tensors for name in ("cls", "cls.output")):
        raise ConfigError(
            f"{metadata.path} has no tensors cls and cls.output: llama.cpp's converter leaves out the pooler of a BERT "
            "with labels; serve the folder that the file was made from"
        )
    activation: LayerActivation = "tanh" if "token_types.weight" in metadata.tensors else "relu"
    return _layer(metadata, "cls", activation), _layer(metadata, "cls.output")


def _layer(metadata: GGUFMetadata, name: str, activation: LayerActivation = "none") -> PooledLayer:
    outputs, inputs = metadata.tensors[f"{name}.weight"].shape
    return PooledLayer(name, inputs, outputs, has_bias=f"{name}.bias" in metadata.tensors, activation=activation)
