"""The programs that send arrays from the devices of one pipeline stage to those of another, past no host.

A stage is a mesh of its own. A transfer runs over the devices of both: each device of the one stage sends its part to
the device at the same place in the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.layers.axes import STAGE_AXIS
from jaxserve.runtime.devices.mesh import LOGICAL_AXES
from jaxserve.runtime.programs.builder import MeshProgramBuilder
from jaxserve.runtime.programs.table import KINDS
from jaxserve.runtime.step.batch import step_shape
from jaxserve.runtime.step.draw import DRAW
from jaxserve.runtime.step.handoff import Handoff, feedback_specs, result_specs
from jaxserve.runtime.step.program import ProgramKey, Shapes
from jaxserve.runtime.step.state import ArraySpec
from jaxserve.runtime.step.step import handoff_of, pools
from jaxserve.step_plan import Capacity


class TransferBuilder(MeshProgramBuilder):
    """Makes the transfers from the devices of `source` to those of `target`, two meshes of one shape.

    `trees_of` are the specs of what each program sends, by key. A program takes and returns arrays over the devices of
    both stages, with a part for each along the first axis. It reads the source's part and returns the target's. The
    devices are in ascending order, whichever stage is the source: for others, XLA logs an error on a GPU.
    """

    def __init__(
        self,
        source: Mesh,
        target: Mesh,
        capacity: Capacity,
        trees_of: Mapping[ProgramKey, Any],
        num_processes: int = 1,
    ) -> None:
        first, second = sorted((source, target), key=lambda mesh: int(mesh.devices.flat[0].id))
        devices = np.stack([first.devices, second.devices])
        super().__init__(Mesh(devices, (STAGE_AXIS, *source.axis_names)), capacity, num_processes)
        self.trees_of = trees_of
        self._way = (0, 1) if first is source else (1, 0)

    @property
    def keys(self) -> list[ProgramKey]:
        """The keys of its programs."""
        return list(self.trees_of)

    def lower(self, key: ProgramKey) -> jax.stages.Lowered:
        given = [
            jax.ShapeDtypeStruct(doubled(spec), spec.dtype, sharding=NamedSharding(self.mesh, both(spec)))
            for spec in self._specs(key)
        ]
        parts = tuple(map(both, self._specs(key)))

        def send(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(lax.ppermute(array, STAGE_AXIS, [self._way]) for array in arrays)

        send.__name__ = str(key).replace("-", "_")
        over_mesh = jax.shard_map(send, mesh=self.mesh, in_specs=parts, out_specs=parts, check_vma=False)
        return jax.jit(over_mesh).lower(*given)

    def trees(self, key: ProgramKey) -> tuple[Any, Any]:
        arrays = tuple(self._specs(key))
        return jax.tree.structure((arrays, {})), jax.tree.structure(arrays)

    def facts(self) -> dict[str, Any]:
        sent = {
            str(key): [[list(spec.shape), spec.dtype.name, list(spec.axes)] for spec in self._specs(key)]
            for key in self.trees_of
        }
        return {**self.environment_facts(), "way": list(self._way), "sent": sent}

    def _specs(self, key: ProgramKey) -> list[ArraySpec]:
        return jax.tree.leaves(self.trees_of[key])


def doubled(spec: ArraySpec) -> tuple[int, ...]:
    """Return the shape of an array over the devices of two stages."""
    return (2 * spec.shape[0], *spec.shape[1:])


def both(spec: ArraySpec) -> PartitionSpec:
    """Return the mesh axes of an array over the devices of two stages."""
    first, *rest = (LOGICAL_AXES[axis] for axis in spec.axes)
    return PartitionSpec((STAGE_AXIS, *first), *(axes or None for axes in rest))


def send_key(key: ProgramKey, capacity: Capacity) -> ProgramKey:
    """Return the key of the transfer to the next stage in a step."""
    return ProgramKey("send", step_shape(key, capacity).tokens)


FEEDBACK_KEY = ProgramKey("feedback")
"""The key of the transfer of a `Feedback` alone."""


def result_key(key: ProgramKey) -> ProgramKey:
    """Return the key of the transfer of a program's result, from the last stage to the first in another process."""
    return key._replace(kind=f"return_{key.kind}")


def handoffs(shapes: Shapes, keys: Iterable[ProgramKey]) -> dict[ProgramKey, Handoff]:
    """Return the specs of the transfers from a stage to the next one, in the steps among these keys."""
    stage, capacity = shapes.context.model.stage, shapes.capacity
    assert stage is not None
    steps = [key for key in keys if KINDS[key.kind].is_step]
    return {send_key(key, capacity): handoff_of(shapes, key, before=stage.end) for key in steps}


def feedbacks(shapes: Shapes, keys: Iterable[ProgramKey], *, results: bool, gathered: bool) -> dict[ProgramKey, Any]:
    """Return the specs of the transfers from the last stage to the first one, of the programs of these keys.

    With `results`, they include what the host reads; see `result_specs` for `gathered`.
    """
    model, capacity = shapes.context.model, shapes.capacity
    alone = feedback_specs(model, capacity)
    found: dict[ProgramKey, Any] = {FEEDBACK_KEY: {"feedback": alone}}
    for key in keys if results else ():
        if KINDS[key.kind].is_step:
            shape = step_shape(key, capacity)
            prompt = shape.tokens if key.kind == "prompt_logprobs" else 0
            made = result_specs(
                model,
                capacity,
                shape.rows,
                columns=(1 + shape.max_drafts,),
                logprobs=not key.greedy,
                prompt=prompt,
                pooled=pools(model, key),
                gathered=gathered,
            )
        elif key.kind == DRAW.name:
            made = result_specs(model, capacity, key.size, gathered=gathered)
        else:
            continue
        found[result_key(key)] = {
            "feedback": alone,
            **{name: specs for name, specs in made.items() if specs is not None},
        }
    return found
