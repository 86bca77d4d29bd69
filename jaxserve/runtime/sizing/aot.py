"""Compiles the programs of a deployment for attached devices or a target: the work of `jaxserve compile`.

Those of a deployment with pipeline stages are in parts: a part for each stage, then one for each transfer between two.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import jax
import msgspec
from jax.sharding import Mesh

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.devices.attach import attach
from jaxserve.runtime.devices.device import facts_of_devices, facts_of_target
from jaxserve.runtime.devices.mesh import make_stage_meshes
from jaxserve.runtime.devices.target import load_target
from jaxserve.runtime.devices.topology import target_meshes
from jaxserve.runtime.programs.builder import by_compile_cost, program_path
from jaxserve.runtime.programs.bundle import BundlePart, stage_name, transfer_name
from jaxserve.runtime.programs.inspection import ProgramReport, compile_and_inspect
from jaxserve.runtime.programs.table import KINDS
from jaxserve.runtime.sizing.deployment import Deployment, read_model, read_stored
from jaxserve.runtime.sizing.memory_advice import deploy_or_advise
from jaxserve.runtime.sizing.mesh_validation import check_mesh
from jaxserve.runtime.sizing.prediction import Prediction, predict
from jaxserve.runtime.sizing.temp_memory import size_pool_by_compiler
from jaxserve.runtime.step.program import ProgramKey


def deploy_on_target(config: EngineConfig, name: str) -> Deployment:
    """Return the deployment that a configuration makes on a target device. Raises `ConfigError`."""
    target = load_target(name)
    if config.device not in ("auto", target.platform):
        raise ConfigError(f"device={config.device} and target {name!r}, which is {target.platform}: leave one out")
    model, device = read_model(config), facts_of_target(name, config.nnodes, config.pp_size)
    # Replicas run on one machine too, and take as many of its devices as one mesh would.
    check_mesh(msgspec.structs.replace(config, dp_mode="mesh"), model, device)
    return deploy_or_advise(config, model, device, read_stored(config, model))


def meshes_for_target(deployment: Deployment, name: str) -> list[Mesh]:
    """Return the mesh of each of its stages. Makes jax use the CPU even if an accelerator is attached.

    Raises `ConfigError`.
    """
    jax.config.update("jax_platforms", "cpu")
    return target_meshes(name, len(deployment.parts), **deployment.mesh_sizes)


def deploy_on_device(config: EngineConfig) -> tuple[Deployment, list[Mesh]]:
    """Return the deployment on the attached devices and the mesh of each of its stages. Raises `ConfigError`."""
    devices = attach(config)
    facts = facts_of_devices(devices, config)
    model = read_model(config)
    deployment = deploy_or_advise(config, model, facts, read_stored(config, model))
    meshes = make_stage_meshes(devices, len(deployment.parts), **deployment.mesh_sizes)
    return size_pool_by_compiler(deployment, dict(enumerate(meshes)), None), meshes


def deploy_for_bundle(config: EngineConfig, name: str) -> tuple[Deployment, list[Mesh]]:
    """Return the deployment on a target device, its pool sized by the compiler, and the mesh of each of its stages.

    Raises `ConfigError`, also for a target that isn't a GPU.
    """
    if load_target(name).platform != "cuda":
        raise ConfigError(f"--output and --target {name}: only programs for NVIDIA GPUs are kept without a device")
    deployment = deploy_on_target(config, name)
    meshes = meshes_for_target(deployment, name)
    return size_pool_by_compiler(deployment, dict(enumerate(meshes)), None), meshes


def program_parts(deployment: Deployment, meshes: Sequence[Mesh]) -> list[BundlePart]:
    """Return all programs: those of each stage, then those of the transfers between stages with different devices."""
    parts = [
        BundlePart(stage_name(part.model.stage), part.builder(mesh), part.program_keys)
        for part, mesh in zip(deployment.parts, meshes, strict=True)
    ]
    for i, builder in enumerate(deployment.transfer_builders(meshes) if deployment.stages else ()):
        if len(set(builder.mesh.devices.flat)) == builder.mesh.size:
            parts.append(BundlePart(transfer_name(i), builder, builder.keys))
    return parts


def left_out_transfers(deployment: Deployment, parts: Iterable[BundlePart]) -> list[str]:
    """Return the names of the transfers that are not among the parts."""
    wanted, found = map(transfer_name, range(len(deployment.stages))), {part.name for part in parts}
    return [name for name in wanted if name not in found]


def matching_programs(parts: Sequence[BundlePart], pattern: str = "*") -> list[BundlePart]:
    """Return the programs whose names match, with or without that of their part. Raises `ConfigError` if none does."""

    def matches(part: BundlePart, key: ProgramKey) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for name in (str(key), part.program_name(key)))

    chosen = [
        dataclasses.replace(part, keys=keys)
        for part in parts
        if (keys := [key for key in part.keys if matches(part, key)])
    ]
    if not chosen:
        raise ConfigError(f"no program is called {pattern!r}; there are {', '.join(names_of(parts))}")
    return chosen


def names_of(parts: Iterable[BundlePart]) -> list[str]:
    """Return the names of all programs, in order."""
    return [name for part in parts for name in part.program_names]


def compile_programs(parts: Sequence[BundlePart], folder: Path | None = None) -> Iterator[ProgramReport]:
    """Compile in parallel and yield a report as each program is done. Store programs without a fault in `folder`."""

    def make(part: BundlePart, key: ProgramKey) -> ProgramReport:
        report, compiled = compile_and_inspect(part.builder, key, attached=folder is not None)
        if folder is not None and compiled is not None and report.fault is None:
            part.builder.store(compiled, program_path(folder / part.name, key))
        return dataclasses.replace(report, name=part.program_name(key))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = [pool.submit(make, part, key) for part in parts for key in by_compile_cost(part.keys)]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            for future in waiting:
                future.cancel()


def predict_steps(
    deployment: Deployment, name: str, parts: Sequence[BundlePart], reports: Sequence[ProgramReport]
) -> dict[str, Prediction]:
    """Return the predicted time of each step program that was compiled for a target, by name."""
    by_name = {report.name: report for report in reports}
    stages = {stage_name(one.model.stage): one for one in deployment.parts}
    found = {}
    for part, key in ((one, key) for one in parts if one.name in stages for key in one.keys):
        report = by_name[part.program_name(key)]
        if KINDS[key.kind].is_step and report.cost is not None:
            exchanges = sum(report.collectives.values())
            found[report.name] = predict(stages[part.name], load_target(name), key, report.cost, exchanges)
    return found
