"""The host memory of a deployment's cache: how many pages and states it has room for, and the pools that hold them."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Sequence

from jax.sharding import Mesh

from jaxserve.config.device_numbers import devices_needed
from jaxserve.config.schema import EngineConfig
from jaxserve.runtime.execution.host_pool import HostPool, host_pages
from jaxserve.runtime.sizing.deployment import Deployment
from jaxserve.runtime.step.page_copies import num_groups, row_specs
from jaxserve.runtime.step.state import ArraySpec

logger = logging.getLogger("jaxserve.runtime")


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """Room for `pages` of each KV group and for `states`, of each rank; none without a hierarchical cache.

    `rows` are the arrays of a page, by part of the deployment and by group; states are the last group.
    """

    pages: tuple[int, ...]
    states: int
    rows: Sequence[Sequence[tuple[ArraySpec, ...]]]

    def pools(self, part: int, mesh: Mesh) -> list[HostPool]:
        """Return the pools of a part of the deployment, on its mesh."""
        counts = (*self.pages, self.states)
        return [HostPool(specs, count, mesh) for specs, count in zip(self.rows[part], counts)] if self.pages else []

    def log(self, config: EngineConfig, deployment: Deployment, nbytes: int) -> None:
        """Log what there is room for, in `nbytes` of this host, if anything."""
        if not self.pages:
            return
        page = deployment.data * deployment.capacity.page_size
        logger.info(
            "hierarchical cache: %s tokens%s in host memory (%.2f GiB), %s",
            " and ".join(str(count * page) for count in self.pages),
            f" and {deployment.data * self.states} states" if self.states else "",
            nbytes / 2**30,
            config.hicache_write_policy,
        )


def plan_host_memory(config: EngineConfig, deployment: Deployment, free: int) -> HostMemory:
    """Return the host memory of a deployment, on a node with `free` bytes, or on several of which none has less.

    Raises `ConfigError` if a page has no room, or the host too little.
    """
    capacity = deployment.capacity
    groups = range(num_groups(capacity))
    rows = [[row_specs(part.state, group) for group in groups] for part in deployment.parts]
    of_all_parts = [list(itertools.chain.from_iterable(own)) for own in zip(*rows)]
    states = [capacity.num_states] if capacity.num_states else []
    counts = host_pages(
        config, [*capacity.pages_by_group, *states], of_all_parts, _share_bytes(config, deployment, free)
    )
    split = len(capacity.pages_by_group)
    return HostMemory(counts[:split], sum(counts[split:]), rows)


def _share_bytes(config: EngineConfig, deployment: Deployment, free: int) -> int:
    """Return the bytes of this engine's part of `hicache_host_memory_fraction`, on all nodes; 0 if it isn't set."""
    sizes = deployment.sizes
    if deployment.device.platform == "cpu":  # where the model and its cache take the same memory
        free = max(0, free - devices_needed(config) * (sizes.footprint.non_pool + sizes.pool_bytes))
    return int((config.hicache_host_memory_fraction or 0.0) * free) * config.nnodes // deployment.replicas
