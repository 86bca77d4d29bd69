"""The device mesh, and the table that maps the logical axes of arrays to mesh axes.

The `data` axis divides the devices into ranks: the state has a leading axis of ranks, and each row of a step's packed
input belongs to one rank. The axes `expert` and `tensor` together divide a rank into shards (`TENSOR_AXES`): heads, MLP
and vocabulary are split over both, all shards get the same input, and `layers` and `sampling` say what they exchange.
The experts of a mixture are split over `expert`, and each expert over `tensor`. With data-parallel attention, experts
are split over the ranks too, which then exchange tokens; else ranks exchange nothing. A pipeline stage is a mesh of its
own; `programs/transfers.py` joins two of them along the axis `stage`.
`sizing/mesh_validation.py` checks which mesh shapes a model allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError
from jaxserve.layers.axes import DATA_AXIS, EXPERT_AXIS, EXPERT_TENSOR_AXIS, TENSOR_AXES

# Logical axis of a parameter or a state array -> mesh axes; without any it is not split.
LOGICAL_AXES: dict[str | None, tuple[str, ...]] = {
    None: (),
    "ranks": (DATA_AXIS,),
    "kv_heads": TENSOR_AXES,
    "heads": TENSOR_AXES,
    "mlp": TENSOR_AXES,
    "vocab": TENSOR_AXES,
    "experts": (EXPERT_AXIS,),
    "experts_of_ranks": (DATA_AXIS, EXPERT_AXIS),
    "expert_mlp": (EXPERT_TENSOR_AXIS,),
    "features": TENSOR_AXES,
}


GPU = ("gpu", "cuda")
"""jax's names for the platform of an NVIDIA GPU, attached or not."""


def axis_sizes(*, data: int = 1, tensor: int = 1, expert: int = 1) -> dict[str, int]:
    """Return the sizes of the mesh axes, in order: `data` ranks of `tensor` shards, which are in `expert` groups.

    Each group has experts of its own; its shards divide each of them.
    """
    assert tensor % expert == 0, (tensor, expert)
    return {DATA_AXIS: data, EXPERT_AXIS: expert, EXPERT_TENSOR_AXIS: tensor // expert}


def make_mesh(devices: Sequence[Any], *, data: int = 1, tensor: int = 1, expert: int = 1) -> Mesh:
    """Return a mesh of the first `data * tensor` devices, which need not be attached (see `axis_sizes`)."""
    axes = axis_sizes(data=data, tensor=tensor, expert=expert)
    return Mesh(np.array(list(devices[: data * tensor])).reshape(*axes.values()), tuple(axes))


def make_stage_meshes(
    devices: Sequence[Any], stages: int, *, data: int = 1, tensor: int = 1, expert: int = 1
) -> list[Mesh]:
    """Return the mesh of each pipeline stage, which have the devices in order."""
    each = data * tensor
    return [make_mesh(devices[stage * each :], data=data, tensor=tensor, expert=expert) for stage in range(stages)]


def partition(axes: tuple[str | None, ...]) -> PartitionSpec:
    """Return the mesh axes of an array from its logical axes."""
    return PartitionSpec(*(LOGICAL_AXES[axis] or None for axis in axes))


def shardings(mesh: Mesh, specs: Any) -> Any:
    """Return a tree of shardings for a tree whose leaves have `axes` (`ParamSpec`, `ArraySpec`)."""
    return jax.tree.map(lambda s: NamedSharding(mesh, partition(s.axes)), specs)


def partitions(specs: Any) -> Any:
    """Return a tree of partition specs, for `shard_map`, for a tree whose leaves have `axes`."""
    return jax.tree.map(lambda s: partition(s.axes), specs)


def device_bytes(specs: Any, sizes: Mapping[str, int]) -> int:
    """Return the bytes of a tree of specs on one device of a mesh whose axes have these sizes (`mesh.shape`).

    Raises `ConfigError` if an axis can't be split evenly.
    """
    total = 0
    for spec in jax.tree.leaves(specs):
        parts = 1
        for length, name in zip(spec.shape, spec.axes):
            split = math.prod(sizes.get(axis, 1) for axis in LOGICAL_AXES[name])
            if length % split:
                raise ConfigError(f"{split} devices can't split this model: that doesn't divide {length} ({name})")
            parts *= split
        total += spec.nbytes // parts
    return total


def shape_structs(mesh: Mesh, specs: Any) -> Any:
    """Return a tree of shapes with shardings for a tree of specs: with it, programs are lowered without arrays."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, partition(s.axes))), specs
    )


def platform_of(mesh: Mesh) -> str:
    """Return jax's name for the platform of a mesh's devices."""
    return str(mesh.devices.flat[0].platform)
