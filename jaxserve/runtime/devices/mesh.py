"""The device mesh, made once, and the one table that maps logical axes of arrays to its axes.

Along `data` stand ranks: the state has a leading axis of them, each row of a step's packed input is one rank's, and
nothing is exchanged between them. Along `tensor` stand the shards of a rank: heads, MLP and vocabulary are split, the
input is the same on all, and `layers` and `sampling` write what they exchange. The names `expert` and `stage` are kept
for axes to come. Which shapes a model allows is in `parallel.py`.
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

# Logical axis of a parameter or a state array -> mesh axis; None, and names that stand here as None, are not split.
LOGICAL_AXES: dict[str | None, str | None] = {
    None: None,
    "ranks": DATA_AXIS,
    "kv_heads": TENSOR_AXIS,
    "mlp": TENSOR_AXIS,
    "vocab": TENSOR_AXIS,
}


def make_mesh(devices: Sequence[Any], *, data: int = 1, tensor: int = 1) -> Mesh:
    """A mesh of the first `data * tensor` devices. `devices` may be those of a topology that isn't attached."""
    count = data * tensor
    return Mesh(np.array(list(devices[:count])).reshape(data, tensor), (DATA_AXIS, TENSOR_AXIS))


def partition(axes: tuple[str | None, ...]) -> PartitionSpec:
    """The mesh axes of an array from its logical ones."""
    return PartitionSpec(*(LOGICAL_AXES[axis] for axis in axes))


def shardings(mesh: Mesh, specs: Any) -> Any:
    """A tree of shardings for a tree whose leaves have `axes` (`ParamSpec`, `ArraySpec`)."""
    return jax.tree.map(lambda s: NamedSharding(mesh, partition(s.axes)), specs)


def partitions(specs: Any) -> Any:
    """The same as partition specs, for `shard_map`."""
    return jax.tree.map(lambda s: partition(s.axes), specs)


def device_bytes(specs: Any, sizes: Mapping[str, int]) -> int:
    """Bytes of a tree of specs on one device of a mesh whose axes have these sizes (`mesh.shape`).

    Raises `ConfigError` where an axis can't be split so.
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
    """The same as shapes with shardings, to lower programs without arrays."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, partition(s.axes))), specs
    )
