"""Quantized weights: how checkpoints store them, how a deployment holds them, and the parameter tree with them."""

from jaxserve.quant.checkpoint import CheckpointQuantization, read_quantization, stored_by_config
from jaxserve.quant.choice import EMBEDDING, HEAD, WeightChoice, WeightForm, choose_weights
from jaxserve.quant.stored import GGUF_TYPES, Stored, StoredWeight
from jaxserve.quant.transform import flat_inputs, held_weights, hold_weights

__all__ = [
    "EMBEDDING",
    "GGUF_TYPES",
    "HEAD",
    "CheckpointQuantization",
    "Stored",
    "StoredWeight",
    "WeightChoice",
    "WeightForm",
    "choose_weights",
    "flat_inputs",
    "held_weights",
    "hold_weights",
    "read_quantization",
    "stored_by_config",
]
