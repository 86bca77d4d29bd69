"""From a checkpoint to a model's parameters on their devices: `open_weights`, then `build`.

A format is one file here: a `TensorSource` where tensors have Hugging Face's names, else a `WeightReader`. Nothing here
knows a model: names and places come from its family.
"""

from jaxserve.weights.arrays import WeightReader, build
from jaxserve.weights.dummy import dummy_params
from jaxserve.weights.load import load_params
from jaxserve.weights.open import check_tensors, open_source, open_weights, stored_types
from jaxserve.weights.source import TensorInfo, TensorSource

__all__ = [
    "TensorInfo",
    "TensorSource",
    "WeightReader",
    "build",
    "check_tensors",
    "dummy_params",
    "load_params",
    "open_source",
    "open_weights",
    "stored_types",
]
