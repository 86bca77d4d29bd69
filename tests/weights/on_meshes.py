"""Run by test_meshes.py where jax sees eight CPU devices, one process' or several's: a model read on meshes of them.

Prints one JSON object: for each mesh shape the bytes read from the safetensors files, and the bytes of the shards.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.model_source import ModelSource, read_config, resolve
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.runtime.devices.mesh import make_mesh, shardings
from jaxserve.weights.arrays import WeightReader, build_params, flatten
from jaxserve.weights.load import checkpoint_reader
from jaxserve.weights.open import is_ignored, open_source, open_weights

F32 = np.dtype(np.float32)


class Counted:
    """A tensor of a safetensors file that counts the bytes that are read from it."""

    def __init__(self, inner: Any, count: Callable[[int], None]) -> None:
        self.inner, self.count = inner, count

    def __getitem__(self, window: Any) -> Any:
        array = self.inner[window]
        self.count(array.nbytes)
        return array


def reader_on(source: ModelSource, shards: int, read: list[int]) -> tuple[Any, WeightReader]:
    """Return the specs of a model for `shards` shards, and a reader that appends the bytes of each read to `read`."""
    abstract = abstract_params(LaidOutModel(parse_model_config(read_config(source)), shards=shards), F32)
    if source.kind == "orbax":
        return abstract, open_weights(source, abstract)
    tensors = open_source(source)
    tensors._slices = {
        name: functools.partial(Counted, stored(), read.append) for name, stored in tensors._slices.items()
    }
    return abstract, checkpoint_reader(abstract, tensors, ignored=is_ignored)


def load_on(source: ModelSource, mesh: Mesh) -> dict[str, int]:
    """Load a model on a mesh, and compare each shard with the same part of the whole parameter."""
    whole: list[int] = []
    read: list[int] = []
    abstract, reader = reader_on(source, mesh.shape["tensor"], read)
    _, naive = reader_on(source, mesh.shape["tensor"], whole)
    params = build_params(abstract, shardings(mesh, abstract), reader)
    shard_bytes = 0
    for (path, spec), array in zip(flatten(abstract)[0], jax.tree.leaves(params), strict=True):
        assert array.shape == spec.shape
        stored = np.empty(spec.stored_shape, spec.dtype)
        naive.fill(path, spec, tuple(slice(0, n) for n in stored.shape), stored)
        expected = np.zeros(spec.shape, spec.dtype)
        for source_window, target in spec.windows((slice(None),) * len(spec.shape)):
            expected[target] = stored[source_window]
        seen = set()
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index], err_msg=str(path))
            seen.add((str(shard.index), shard.data.nbytes))
        shard_bytes += sum(nbytes for _, nbytes in seen)
    return {"read": sum(read), "shards": shard_bytes, "checkpoint": sum(whole)}


def main(model: str, shapes: list[str]) -> None:
    source = resolve(model)
    found = {}
    for shape in shapes:
        data, tensor = map(int, shape.split("x"))
        found[shape] = load_on(source, make_mesh(jax.devices(), data=data, tensor=tensor))
    print(json.dumps(found))


if __name__ == "__main__":
    peers, folder, *shapes = sys.argv[1:]
    if peers != "single":
        address, rank = peers.split("/")
        jax.distributed.initialize(address, num_processes=2, process_id=int(rank))
    main(folder, shapes)
