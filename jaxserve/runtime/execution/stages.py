"""Connects the pipeline stages of a deployment, by the programs that send arrays from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.runtime.devices.mesh import shardings
from jaxserve.runtime.execution.device_commands import LocalCommands
from jaxserve.runtime.execution.stage_clock import StageClock
from jaxserve.runtime.execution.stage_transfer import StageTransfer
from jaxserve.runtime.execution.staged_commands import StagedCommands
from jaxserve.runtime.execution.startup import program_cache_dir
from jaxserve.runtime.programs.bundle import BundleManifest
from jaxserve.runtime.programs.program_cache import build_programs
from jaxserve.runtime.sizing.deployment import Deployment
from jaxserve.runtime.step.handoff import feedback_specs


def connect_stages(
    deployment: Deployment,
    meshes: Sequence[Mesh],
    stages: Sequence[LocalCommands | None],
    bundle: BundleManifest | None,
    on_failure: Callable[[str], None],
) -> tuple[StagedCommands, int]:
    """Return the commands of all stages, and how many programs were compiled. `stages` of other processes are None.

    `on_failure` gets the reason if a stage of this process fails: those after it would wait for it.
    """
    cache, count = program_cache_dir(deployment.config), 0
    targets = [*meshes[1:], meshes[0]]
    transfers: list[StageTransfer | None] = []
    for builder, source, target in zip(deployment.transfer_builders(meshes), meshes, targets, strict=True):
        transfer = None
        if source.local_devices or target.local_devices:
            programs, compiled = build_programs(builder, list(builder.trees_of), cache)
            transfer, count = StageTransfer(builder, source, target, programs), count + compiled
        transfers.append(transfer)
    feedback = None
    if meshes[0].local_devices:
        specs = feedback_specs(deployment.model, deployment.capacity)
        feedback = jax.tree.map(
            lambda spec, where: jnp.zeros(spec.shape, spec.dtype, device=where), specs, shardings(meshes[0], specs)
        )
    clocks = [None if stage is None else StageClock(i, on_failure) for i, stage in enumerate(stages)]
    return StagedCommands(deployment.capacity, stages, transfers, clocks, feedback), count
