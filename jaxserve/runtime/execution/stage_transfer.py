"""Sends arrays from the devices of a pipeline stage to those of another, by programs that run on both.

The arrays of both stages become one, without a copy: of what a program takes, the part of the source is what is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxserve.runtime.devices.mesh import partition
from jaxserve.runtime.programs.program_set import Program
from jaxserve.runtime.programs.transfers import TransferBuilder, both, doubled
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.state import ArraySpec


class StageTransfer:
    """Runs the `programs` of a pair of stages. Each process that has devices of either calls it, in the same order.

    `fields` are the names of what a program sends, if that is a dictionary.
    """

    def __init__(
        self, builder: TransferBuilder, source: Mesh, target: Mesh, programs: Mapping[ProgramKey, Program]
    ) -> None:
        self._programs = programs
        self._paths = {
            key: [_Path(spec, builder.mesh, source, target) for spec in jax.tree.leaves(tree)]
            for key, tree in builder.trees_of.items()
        }
        self.fields = {key: tuple(tree) for key, tree in builder.trees_of.items() if isinstance(tree, dict)}
        self._structures: dict[ProgramKey, Any] = {
            key: jax.tree.structure(tree) for key, tree in builder.trees_of.items()
        }

    def send(self, key: ProgramKey, sent: Any) -> Any:
        """Start to send a tree of arrays, and return what arrives; None stands for a stage without devices here."""
        paths, structure = self._paths[key], self._structures[key]
        leaves = [None] * len(paths) if sent is None else structure.flatten_up_to(sent)
        arrived = self._programs[key](*(path.join(leaf) for path, leaf in zip(paths, leaves, strict=True)))
        if not paths[0].arrives_here:
            return None
        return structure.unflatten([path.part(array) for path, array in zip(paths, arrived, strict=True)])


class _Path:
    """An array on the way from a stage to another. `arrives_here` if devices of the target are of this process."""

    def __init__(self, spec: ArraySpec, mesh: Mesh, source: Mesh, target: Mesh) -> None:
        self._spec = spec
        self._over_both = NamedSharding(mesh, both(spec))
        self._at_target = NamedSharding(target, partition(spec.axes))
        here = set(target.local_devices)
        self.arrives_here = bool(here)
        self._here = here
        empty = np.zeros(self._at_target.shard_shape(spec.shape), spec.dtype)
        self._in_place = [jax.device_put(empty, device) for device in target.local_devices]
        self._shape = doubled(spec)

    def join(self, array: jax.Array | None) -> jax.Array:
        """Return the array over both stages, whose part at the target is anything."""
        own = [] if array is None else [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(self._shape, self._over_both, [*own, *self._in_place])

    def part(self, array: jax.Array) -> jax.Array:
        """Return what arrived at the target."""
        own = [shard.data for shard in array.addressable_shards if shard.device in self._here]
        return jax.make_array_from_single_device_arrays(self._spec.shape, self._at_target, own)
