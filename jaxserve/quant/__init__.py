"""Weights that are kept quantized: which of a model's are, and its tree of parameters with them in it."""

from jaxserve.quant.formats import EMBEDDING, HEAD, Packing, Stored, choose
from jaxserve.quant.transform import pack, packed_weights

__all__ = ["EMBEDDING", "HEAD", "Packing", "Stored", "choose", "pack", "packed_weights"]
