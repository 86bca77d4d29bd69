"""The processes of a mesh over several nodes, as actors in the placement group of their replica, one in each bundle.

The replica itself is node rank 0. A follower ends with its engine, and its engine with that of any other node: then the
replica is unhealthy, and Serve starts another one with followers of its own.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxserve import host
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.client import launch_follower
from jaxserve.errors import ConfigError
from jaxserve.observability import log

logger = logging.getLogger("jaxserve.server")

_STOP_SECONDS = 10.0


class Followers:
    """The other processes of a replica's mesh; none for a mesh on one node. `leader_config` is for the replica."""

    def __init__(self, leader_config: EngineConfig, actors: list[Any], runs: list[Any]) -> None:
        self.leader_config = leader_config
        self._actors = actors
        self._runs = runs

    @classmethod
    async def start(cls, config: EngineConfig, engine_module: str) -> Followers:
        """Start a follower in each bundle but the first; each connects to the leader's engine once both run.

        Raises `ConfigError` if the replica has no placement group with a bundle for each node.
        """
        if config.nnodes == 1:
            return cls(config, [], [])
        group = get_current_placement_group()
        if group is None or group.bundle_count < config.nnodes:
            raise ConfigError(f"nnodes={config.nnodes} needs a placement group of as many bundles")
        config = msgspec.structs.replace(
            config, node_rank=0, dist_init_addr=f"{ray.util.get_node_ip_address()}:{host.free_port()}"
        )
        actors = []
        for rank in range(1, config.nnodes):
            bundle = group.bundle_specs[rank]
            actors.append(
                _Follower.options(  # type: ignore[attr-defined]
                    num_cpus=bundle.get("CPU", 0),
                    num_gpus=bundle.get("GPU", 0),
                    resources={name: count for name, count in bundle.items() if name not in ("CPU", "GPU")},
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
                ).remote(msgspec.structs.replace(config, node_rank=rank), engine_module)
            )
        return cls(config, actors, [actor.run.remote() for actor in actors])

    async def stop(self) -> None:
        """Wait until the followers have ended, which they do with the leader's engine; then end their actors."""
        if self._runs:
            await asyncio.wait([asyncio.ensure_future(_settled(run)) for run in self._runs], timeout=_STOP_SECONDS)
        for actor in self._actors:
            ray.kill(actor)


async def _settled(run: Any) -> None:
    try:
        await run
    except Exception as error:
        logger.warning("A follower has ended: %s", error)


@ray.remote
class _Follower:
    def __init__(self, config: EngineConfig, engine_module: str) -> None:
        self._config = config
        self._module = engine_module

    async def run(self) -> str:
        """Follow node rank 0 and return why that has ended. Raises the errors of `launch_follower`."""
        log.setup(self._config.log_level, config_file=self._config.log_config_file)
        engine = await launch_follower(self._config, module=self._module)
        logger.info("Ready: following node rank 0")
        try:
            return await asyncio.shield(engine.ended)
        finally:
            await engine.stop(_STOP_SECONDS)
