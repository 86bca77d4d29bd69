"""Replaces dense weights in a model's tree of `ParamSpec`s by packed ones, and finds those in such a tree."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxserve.params import ParamSpec, Path, path_of
from jaxserve.quant.formats import HEAD
from pallas_kernels.quantized_matmul import Bits, PackedWeight, packed_shape


def pack_specs(abstract: Any, bits: Mapping[Path, Bits]) -> Any:
    """Return the tree with a `PackedWeight` at each of the paths; its `data` is the spec of its bytes.

    A head that is tied to the embedding gets a packed weight of its own.
    """
    if HEAD in bits and abstract.output is None:
        abstract = dataclasses.replace(abstract, output=dataclasses.replace(abstract.embedding, inputs=1))

    def pack(keys: tuple[Any, ...], spec: ParamSpec) -> ParamSpec | PackedWeight:
        path = path_of(keys)
        return _pack_spec(spec, bits[path]) if path in bits else spec

    return jax.tree_util.tree_map_with_path(pack, abstract)


def packed_weights(tree: Any) -> dict[Path, PackedWeight]:
    """Return the packed weights of a tree, by the path that the dense weight would have."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, PackedWeight))
    return {path_of(keys): leaf for keys, leaf in leaves if isinstance(leaf, PackedWeight)}


def _pack_spec(spec: ParamSpec, bits: Bits) -> PackedWeight:
    split = len(spec.shape) - (spec.inputs or 1)  # an embedding that is the head too sums over its last dimension
    shape = packed_shape(math.prod(spec.shape[:split]), math.prod(spec.shape[split:]), bits)
    return PackedWeight(ParamSpec(shape, np.dtype(np.uint8), (None,) * len(shape)), spec.shape, bits)
