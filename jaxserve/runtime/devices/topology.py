"""Makes meshes of devices that aren't attached: programs can be lowered and compiled for them, but not run.

It never asks jax for attached devices. A caller without an accelerator sets `JAX_PLATFORMS=cpu`, else jax looks for
one.
"""

from __future__ import annotations

import os

from jax.experimental import topologies
from jax.sharding import Mesh

from jaxserve.errors import ConfigError
from jaxserve.runtime.devices.mesh import make_stage_meshes
from jaxserve.runtime.devices.target import load_target


def target_mesh(name: str, *, tensor: int = 1, data: int = 1, expert: int = 1) -> Mesh:
    """Return a mesh of a target's devices; see `target_meshes`."""
    [mesh] = target_meshes(name, 1, tensor=tensor, data=data, expert=expert)
    return mesh


def target_meshes(name: str, stages: int, *, tensor: int = 1, data: int = 1, expert: int = 1) -> list[Mesh]:
    """Return the mesh of each pipeline stage, of a target's devices.

    If no topology has devices for all stages, those of the largest one are used over again: with room for two stages or
    more, the meshes of neighbours differ. Sets the environment variables of its compiler that aren't set yet.
    Raises `ConfigError` if the target is unknown, its compiler isn't installed or no topology has the devices of a
    stage.
    """
    target, each = load_target(name), tensor * data
    distinct = max(1, min(stages, max(target.topologies) // each))
    arguments = dict(target.topology(distinct * each))
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
    meshes = make_stage_meshes(topology.devices, distinct, data=data, tensor=tensor, expert=expert)
    return [meshes[stage % distinct] for stage in range(stages)]
