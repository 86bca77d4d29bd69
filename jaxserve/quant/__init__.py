"""Quantized weights: how checkpoints store them, how a deployment holds them, and the parameter tree with them."""

from jaxserve.quant.checkpoint import (
    CONVERTED,
    CheckpointQuantization,
    OnTheFly,
    method_of,
    read_quantization,
    stored_by_config,
)
from jaxserve.quant.choice import EMBEDDING, HEAD, Shards, WeightChoice, WeightForm, choose_weights, convert_forms
from jaxserve.quant.stored import GGUF_TYPES, Stored, StoredWeight
from jaxserve.quant.transform import flat_inputs, held_weights, hold_weights

__all__ = [
    "CONVERTED",
    "EMBEDDING",
    "GGUF_TYPES",
    "HEAD",
    "CheckpointQuantization",
    "OnTheFly",
    "Shards",
    "Stored",
    "StoredWeight",
    "WeightChoice",
    "WeightForm",
    "choose_weights",
    "convert_forms",
    "flat_inputs",
    "held_weights",
    "hold_weights",
    "method_of",
    "read_quantization",
    "stored_by_config",
]
