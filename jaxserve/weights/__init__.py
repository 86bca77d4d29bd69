"""From a checkpoint to a model's parameters on their devices: `open_source`, then `load_params`; or `dummy_params`.

A format is one file here with a `TensorSource`. Nothing here knows a model: names and places come from its family.
"""

from jaxserve.weights.dummy import dummy_params
from jaxserve.weights.load import load_params
from jaxserve.weights.open import open_source
from jaxserve.weights.source import TensorInfo, TensorSource

__all__ = ["TensorInfo", "TensorSource", "dummy_params", "load_params", "open_source"]
