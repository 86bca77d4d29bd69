"""Meshes of devices that aren't attached: programs can be lowered and compiled for them, but not run.

It never asks what is attached; a caller that has no accelerator of its own sets `JAX_PLATFORMS=cpu`, or jax looks
for one.
"""

from __future__ import annotations

import os

from jax.experimental import topologies
from jax.sharding import Mesh

from jaxserve.errors import ConfigError
from jaxserve.runtime.devices.mesh import make_mesh
from jaxserve.runtime.devices.target import load_target


def target_mesh(name: str, *, tensor: int = 1, data: int = 1) -> Mesh:
    """A mesh of devices that aren't attached. Sets what their compiler reads from the environment and isn't set yet.

    Raises `ConfigError` where the target is unknown, has no topology of so many devices, or its compiler is missing.
    """
    target = load_target(name)
    arguments = dict(target.topology(tensor * data))
    for variable, value in target.environment.items():
        os.environ.setdefault(variable, value)
    if target.target_config is not None:
        arguments["target_config"] = target.target_config
    try:
        topology = topologies.get_topology_desc(platform=target.platform, **arguments)
    except RuntimeError as error:
        raise ConfigError(
            f"jax can't compile for target {name!r} here ({error}); install its compiler: "
            f"pip install 'jaxserve[{target.extra}]' (in a checkout: pip install -e '.[{target.extra}]')"
        ) from error
    return make_mesh(topology.devices, data=data, tensor=tensor)
