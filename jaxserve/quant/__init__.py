"""Packed weights: chooses which weights of a model are packed, and builds its parameter tree with them."""

from jaxserve.quant.formats import EMBEDDING, HEAD, StoredTypes, WeightPacking, choose_packing
from jaxserve.quant.transform import pack_specs, packed_weights

__all__ = ["EMBEDDING", "HEAD", "StoredTypes", "WeightPacking", "choose_packing", "pack_specs", "packed_weights"]
