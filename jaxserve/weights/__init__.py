"""Loads a checkpoint into a model's parameters on their devices: `open_weights`, then `build_params`.

Each file format has one module here: a `TensorSource` where tensors have Hugging Face names, else a `WeightReader`.
Nothing here knows a model: tensor names and mappings come from the model family.
"""

from jaxserve.weights.arrays import WeightReader, build_params
from jaxserve.weights.dummy import dummy_params
from jaxserve.weights.open import (
    check_tensors,
    checkpoint_kv_scales,
    has_kv_scales,
    open_source,
    open_weights,
    stored_types,
)
from jaxserve.weights.source import TensorInfo, TensorSource

__all__ = [
    "TensorInfo",
    "TensorSource",
    "WeightReader",
    "build_params",
    "check_tensors",
    "checkpoint_kv_scales",
    "dummy_params",
    "has_kv_scales",
    "open_source",
    "open_weights",
    "stored_types",
]
