"""Connects the pipeline stages of a deployment, by the programs that send arrays from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config.schema import EngineConfig
from jaxserve.runtime.devices.mesh import shardings
from jaxserve.runtime.execution.device_commands import LocalCommands
from jaxserve.runtime.execution.stage_clock import StageClock
from jaxserve.runtime.execution.stage_transfer import StageTransfer
from jaxserve.runtime.execution.staged_commands import StagedCommands
from jaxserve.runtime.execution.startup import program_cache_dir
from jaxserve.runtime.programs.bundle import BundleManifest, BundlePart, load_bundle, transfer_name
from jaxserve.runtime.programs.program_cache import build_programs
from jaxserve.runtime.programs.program_set import Program
from jaxserve.runtime.sizing.deployment import Deployment
from jaxserve.runtime.step.handoff import feedback_specs
from jaxserve.runtime.step.program import ProgramKey


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
    count, targets = 0, [*meshes[1:], meshes[0]]
    transfers: list[StageTransfer | None] = []
    builders = deployment.transfer_builders(meshes)
    for i, (builder, source, target) in enumerate(zip(builders, meshes, targets, strict=True)):
        transfer = None
        if source.local_devices or target.local_devices:
            programs, compiled = _programs(
                deployment.config, BundlePart(transfer_name(i), builder, builder.keys), bundle
            )
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


def _programs(
    config: EngineConfig, part: BundlePart, bundle: BundleManifest | None
) -> tuple[Mapping[ProgramKey, Program], int]:
    """Return the programs of a transfer, and how many of them were compiled."""
    if bundle is not None:
        assert config.programs is not None
        if (loaded := load_bundle(Path(config.programs), bundle, part)) is not None:
            return loaded, 0
    return build_programs(part.builder, part.keys, program_cache_dir(config))
