"""Opens a model's weights with the reader for their file format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.model_source import ModelSource
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import family, is_ignored
from jaxserve.weights.arrays import WeightReader, flatten
from jaxserve.weights.dummy import dummy_reader
from jaxserve.weights.finite import with_finite_check
from jaxserve.weights.gguf import GGUFFile
from jaxserve.weights.hf import SafetensorsFolder
from jaxserve.weights.load import check_names, checkpoint_reader
from jaxserve.weights.packed import packing_reader
from jaxserve.weights.source import TensorSource

LoadFormat = Literal["auto", "safetensors", "gguf", "orbax", "dummy"]

_FORMAT_OF_KIND = {"folder": "safetensors", "gguf": "gguf", "orbax": "orbax"}


def open_weights(
    source: ModelSource, abstract: Any, *, dense: Any = None, load_format: LoadFormat = "auto", seed: int = 0
) -> WeightReader:
    """Return a reader of the parameters of `abstract`; so far only names, shapes and types have been read.

    If some weights are packed, `dense` is the same tree without packed ones. Raises `ConfigError` if the source isn't
    of `load_format`, or its tensors don't fit the model.
    """
    dense = abstract if dense is None else dense
    if load_format == "dummy":
        return packing_reader(abstract, dense, dummy_reader(dense, seed))
    _check_format(source, load_format)
    if source.kind == "orbax":
        # Imported here so that other formats start without it
        from jaxserve.weights.orbax import OrbaxCheckpoint

        return packing_reader(abstract, dense, OrbaxCheckpoint(source.path).reader(dense))
    opened = with_finite_check(open_source(source))
    return checkpoint_reader(abstract, opened, dense, ignored=is_ignored)


def check_tensors(source: ModelSource, model: ModelConfig, load_format: LoadFormat = "auto") -> None:
    """Raise `ConfigError` if the names and shapes of a file's tensors are not those that its config describes.

    Called before programs are compiled, so that a wrong file is found early. A folder of `jaxserve convert` is checked
    when it is opened instead.
    """
    if load_format != "dummy" and source.kind != "orbax":
        module = family(model)
        leaves, _ = flatten(module.abstract(model, np.dtype(np.float32)))
        check_names(open_source(source, load_format), [spec for _, spec in leaves], is_ignored)


def stored_types(source: ModelSource, load_format: LoadFormat = "auto") -> Mapping[str, str]:
    """Return the stored type of each tensor of a GGUF file, where they may be quantized; empty for other formats."""
    if source.kind != "gguf" or load_format == "dummy":
        return {}
    return {name: info.stored_type for name, info in GGUFFile(source.path).infos.items()}


def open_source(source: ModelSource, load_format: LoadFormat = "auto") -> TensorSource:
    """Open the tensors of a GGUF file or a Hugging Face folder. Raises `ConfigError` as `open_weights` does."""
    _check_format(source, load_format)
    assert source.kind != "orbax", source
    return GGUFFile(source.path) if source.kind == "gguf" else SafetensorsFolder(source.path)


def _check_format(source: ModelSource, load_format: LoadFormat) -> None:
    found = _FORMAT_OF_KIND[source.kind]
    if load_format in ("auto", found):
        return
    if load_format == "orbax":
        raise ConfigError(
            f"load_format=orbax was asked for, but {source.path} is no folder of `jaxserve convert`; leave it at auto"
        )
    raise ConfigError(f"load_format={load_format} was asked for, but {source.path} holds {found}; leave it at auto")
