"""Chooses the reader of a checkpoint."""

from __future__ import annotations

from typing import Literal

from jaxserve.errors import ConfigError
from jaxserve.model_source import ModelSource
from jaxserve.weights.gguf import GGUFFile
from jaxserve.weights.hf import SafetensorsFolder
from jaxserve.weights.source import TensorSource


def open_source(source: ModelSource, load_format: Literal["auto", "safetensors", "gguf"] = "auto") -> TensorSource:
    """The weights of `source`. Raises `ConfigError` if `load_format` asks for what the source isn't."""
    found = "gguf" if source.kind == "gguf" else "safetensors"
    if load_format not in ("auto", found):
        raise ConfigError(f"load_format={load_format} was asked for, but {source.path} holds {found}; leave it at auto")
    return GGUFFile(source.path) if found == "gguf" else SafetensorsFolder(source.path)
