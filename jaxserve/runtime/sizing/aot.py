"""Compiles the programs of a deployment for attached devices or a target: the work of `jaxserve compile`."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import jax
import msgspec

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.devices.attach import attach
from jaxserve.runtime.devices.device import facts_of_devices, facts_of_target
from jaxserve.runtime.devices.mesh import make_mesh
from jaxserve.runtime.devices.target import load_target
from jaxserve.runtime.devices.topology import target_mesh
from jaxserve.runtime.programs.builder import ProgramBuilder, by_compile_cost, program_path
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
    model, device = read_model(config.model), facts_of_target(name, config.nnodes, config.pp_size)
    # Replicas run on one machine too, and take as many of its devices as one mesh would.
    check_mesh(msgspec.structs.replace(config, dp_mode="mesh"), model, device)
    return deploy_or_advise(config, model, device, read_stored(config, model))


def builder_for_target(deployment: Deployment, name: str) -> ProgramBuilder:
    """Return the builder of its programs. Makes jax use the CPU even if an accelerator is attached.

    Raises `ConfigError`.
    """
    jax.config.update("jax_platforms", "cpu")
    return deployment.builder(target_mesh(name, **deployment.mesh_sizes))


def deploy_on_device(config: EngineConfig) -> tuple[Deployment, ProgramBuilder]:
    """Return the deployment on the attached devices and the builder of its programs. Raises `ConfigError`."""
    devices = attach(config)
    facts = facts_of_devices(devices, config)
    model = read_model(config.model)
    deployment = deploy_or_advise(config, model, facts, read_stored(config, model))
    mesh = make_mesh(devices, **deployment.mesh_sizes)
    deployment = size_pool_by_compiler(deployment, {0: mesh}, None)
    return deployment, deployment.builder(mesh)


def deploy_for_bundle(config: EngineConfig, name: str) -> tuple[Deployment, ProgramBuilder]:
    """Return the deployment on a target device, its pool sized by the compiler, and the builder of its programs.

    Raises `ConfigError`, also for a target that isn't a GPU.
    """
    if load_target(name).platform != "cuda":
        raise ConfigError(f"--output and --target {name}: only programs for NVIDIA GPUs are kept without a device")
    deployment = deploy_on_target(config, name)
    mesh = builder_for_target(deployment, name).mesh
    deployment = size_pool_by_compiler(deployment, {0: mesh}, None)
    return deployment, deployment.builder(mesh)


def matching_keys(deployment: Deployment, pattern: str = "*") -> list[ProgramKey]:
    """Return the programs whose names match. Raises `ConfigError` if none does."""
    keys = deployment.program_keys
    chosen = [key for key in keys if fnmatch.fnmatchcase(str(key), pattern)]
    if not chosen:
        raise ConfigError(f"no program is called {pattern!r}; there are {', '.join(map(str, keys))}")
    return chosen


def compile_programs(
    builder: ProgramBuilder, keys: Sequence[ProgramKey], folder: Path | None = None
) -> Iterator[ProgramReport]:
    """Compile in parallel and yield a report as each program is done. Store programs without a fault in `folder`."""

    def make(key: ProgramKey) -> ProgramReport:
        report, compiled = compile_and_inspect(builder, key, attached=folder is not None)
        if folder is not None and compiled is not None and report.fault is None:
            builder.store(compiled, program_path(folder, key))
        return report

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = [pool.submit(make, key) for key in by_compile_cost(keys)]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            for future in waiting:
                future.cancel()


def predict_steps(
    deployment: Deployment, name: str, keys: Sequence[ProgramKey], reports: Sequence[ProgramReport]
) -> dict[ProgramKey, Prediction]:
    """Return the predicted time of each step program that was compiled for a target."""
    by_name = {report.name: report for report in reports}
    found = {}
    for key in keys:
        report = by_name[str(key)]
        if KINDS[key.kind].is_step and report.cost is not None:
            exchanges = sum(report.collectives.values())
            found[key] = predict(deployment, load_target(name), key, report.cost, exchanges)
    return found
