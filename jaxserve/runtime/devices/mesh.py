"""The device mesh, and the table that maps the logical axes of arrays to mesh axes.

The `data` axis is that of ranks: the state has a leading axis of ranks, each row of a step's packed input belongs to
one rank, and ranks exchange nothing. The `tensor` axis is that of the shards of a rank: heads, MLP and vocabulary are
split, all shards get the same input, and `layers` and `sampling` say what they exchange. The names `expert` and `stage`
are reserved for future axes. `sizing/mesh_validation.py` checks which mesh shapes a model allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError

DATA_AXIS = "data"
TENSOR_AXIS = "tensor"

# Logical axis of a parameter or a state array -> mesh axis; axes that map to None are not split.
LOGICAL_AXES: dict[str | None, str | None] = {
    None: None,
    "ranks": DATA_AXIS,
    "kv_heads": TENSOR_AXIS,
    "mlp": TENSOR_AXIS,
    "vocab": TENSOR_AXIS,
}


GPU = ("gpu", "cuda")
"""jax's names for the platform of an NVIDIA GPU, attached or not."""


def make_mesh(devices: Sequence[Any], *, data: int = 1, tensor: int = 1) -> Mesh:
    """Return a mesh of the first `data * tensor` devices, which need not be attached."""
    count = data * tensor
    return Mesh(np.array(list(devices[:count])).reshape(data, tensor), (DATA_AXIS, TENSOR_AXIS))


def partition(axes: tuple[str | None, ...]) -> PartitionSpec:
    """Return the mesh axes of an array from its logical axes."""
    return PartitionSpec(*(LOGICAL_AXES[axis] for axis in axes))


def shardings(mesh: Mesh, specs: Any) -> Any:
    """Return a tree of shardings for a tree whose leaves have `axes` (`ParamSpec`, `ArraySpec`)."""
    return jax.tree.map(lambda s: NamedSharding(mesh, partition(s.axes)), specs)


def partitions(specs: Any) -> Any:
    """Return the same as a tree of partition specs, for `shard_map`."""
    return jax.tree.map(lambda s: partition(s.axes), specs)


def device_bytes(specs: Any, sizes: Mapping[str, int]) -> int:
    """Return the bytes of a tree of specs on one device of a mesh whose axes have these sizes (`mesh.shape`).

    Raises `ConfigError` if an axis can't be split evenly.
    """
    total = 0
    for spec in jax.tree.leaves(specs):
        parts = 1
        for length, name in zip(spec.shape, spec.axes):
            split = sizes.get(LOGICAL_AXES[name] or "", 1)
            if length % split:
                raise ConfigError(f"tp_size={split} can't split this model: it doesn't divide {length} ({name})")
            parts *= split
        total += spec.nbytes // parts
    return total


def shape_structs(mesh: Mesh, specs: Any) -> Any:
    """Return a tree of shapes with shardings for a tree of specs, to lower programs without arrays."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, partition(s.axes))), specs
    )


def platform_of(mesh: Mesh) -> str:
    """Return jax's name for the platform of a mesh's devices."""
    return str(mesh.devices.flat[0].platform)
