"""Meshes of devices that aren't attached: programs can be lowered and compiled for them, but not run.

Owns the reading of `configs/targets`, where the facts of each kind of device stand. It never asks what is attached;
a caller that has no accelerator of its own sets `JAX_PLATFORMS=cpu`, or jax looks for one.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxserve.errors import ConfigError
from jaxserve.runtime.mesh import make_mesh

TARGETS = Path(__file__).parents[2] / "configs" / "targets"


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device to compile for.

    `extra` is the extra of jaxserve that brings its compiler, `environment` what that needs to start without a device,
    `topologies` the arguments of `get_topology_desc` by number of devices, `target_config` XLA's description of a GPU.
    """

    platform: str
    extra: str
    environment: Mapping[str, str]
    topologies: Mapping[int, Mapping[str, Any]]
    target_config: str | None = None


def target_names() -> list[str]:
    """The targets there are facts of."""
    return sorted(path.stem for path in TARGETS.glob("*.yaml"))


def load_target(name: str) -> Target:
    """Read a target. Raises `ConfigError` for a name that has no file."""
    if name not in target_names():
        known = ", ".join(target_names()) or f"none in {TARGETS}"
        raise ConfigError(f"target {name!r} is not known; there are: {known}")
    return Target(**yaml.safe_load((TARGETS / f"{name}.yaml").read_text()))


def target_mesh(name: str, *, tensor: int = 1, data: int = 1) -> Mesh:
    """A mesh of devices that aren't attached. Sets what their compiler reads from the environment and isn't set yet.

    Raises `ConfigError` where the target is unknown, has no topology of so many devices, or its compiler is missing.
    """
    target = load_target(name)
    count = tensor * data
    if count not in target.topologies:
        known = ", ".join(str(size) for size in target.topologies)
        raise ConfigError(
            f"target {name!r} has no topology of tensor={tensor} x data={data} devices; there are those of {known}"
        )
    for variable, value in target.environment.items():
        os.environ.setdefault(variable, value)
    arguments = dict(target.topologies[count])
    if target.target_config is not None:
        arguments["target_config"] = target.target_config
    try:
        topology = topologies.get_topology_desc(platform=target.platform, **arguments)
    except RuntimeError as error:
        raise ConfigError(
            f"jax can't compile for target {name!r} here ({error}); install its compiler: "
            f"pip install -e '.[{target.extra}]'"
        ) from error
    return make_mesh(topology.devices, data=data, tensor=tensor)
