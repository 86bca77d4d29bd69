"""What `jaxserve compile` does: every program of a deployment, for a device that isn't attached or the one that is."""

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
from jaxserve.runtime.programs.builder import ProgramBuilder, by_cost, program_path
from jaxserve.runtime.programs.inspection import ProgramReport, compile_and_read
from jaxserve.runtime.programs.program_set import Key
from jaxserve.runtime.sizing.deployment import Deployment, read_model, read_stored
from jaxserve.runtime.sizing.memory_advice import deploy_or_advise
from jaxserve.runtime.sizing.mesh_validation import check_mesh
from jaxserve.runtime.sizing.temp_memory import sized_by_compiler


def deploy_on_target(config: EngineConfig, name: str) -> Deployment:
    """The deployment that a configuration makes on a device that isn't attached. Raises `ConfigError`."""
    target = load_target(name)
    if config.device not in ("auto", target.platform):
        raise ConfigError(f"device={config.device} and target {name!r}, which is {target.platform}: leave one out")
    model, device = read_model(config.model), facts_of_target(name)
    # Replicas too stand on one machine, and take as many of its devices as a mesh of all of them.
    check_mesh(msgspec.structs.replace(config, dp_mode="mesh"), model, device)
    return deploy_or_advise(config, model, device, read_stored(config))


def builder_for_target(deployment: Deployment, name: str) -> ProgramBuilder:
    """What compiles it there. Only the CPU is used, whatever else is attached. Raises `ConfigError`."""
    jax.config.update("jax_platforms", "cpu")
    return deployment.builder(target_mesh(name, tensor=deployment.tensor, data=deployment.data))


def deploy_on_device(config: EngineConfig) -> tuple[Deployment, ProgramBuilder]:
    """The deployment on the devices that are attached, and what compiles it. Raises `ConfigError`."""
    devices = attach(config)
    facts = facts_of_devices(devices, config.tp_size * config.dp_size)
    deployment = deploy_or_advise(config, read_model(config.model), facts, read_stored(config))
    mesh = make_mesh(devices, data=deployment.data, tensor=deployment.tensor)
    deployment = sized_by_compiler(deployment, mesh, None)
    return deployment, deployment.builder(mesh)


def chosen_keys(deployment: Deployment, pattern: str = "*") -> list[Key]:
    """The programs whose names match. Raises `ConfigError` where none does."""
    keys = deployment.all_keys
    chosen = [key for key in keys if fnmatch.fnmatchcase(str(key), pattern)]
    if not chosen:
        raise ConfigError(f"no program is called {pattern!r}; there are {', '.join(map(str, keys))}")
    return chosen


def compile_programs(
    builder: ProgramBuilder, keys: Sequence[Key], folder: Path | None = None
) -> Iterator[ProgramReport]:
    """Compile in parallel; reports come as programs are done. Good ones are kept in the folder, where there is one."""

    def make(key: Key) -> ProgramReport:
        report, compiled = compile_and_read(builder, key)
        if folder is not None and compiled is not None and report.fault is None:
            builder.store(compiled, program_path(folder, key))
        return report

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = [pool.submit(make, key) for key in by_cost(keys)]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            for future in waiting:
                future.cancel()
