"""Makes this process one of several that jax sees as one: the only place that knows how that is done.

It starts jax's coordination through a port of the loopback (`engine/multihost/coordinator_proxy.py` leads it to
process 0), and says by which address the processes' collectives reach each other on a CPU, as jax would take the
host's own name for it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import distributed, xla_bridge
from jax._src.lib import _jax  # type: ignore[attr-defined]
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError, EngineDeadError


def join_processes(*, rank: int, count: int, coordinator_port: int, host: str, timeout: float) -> None:
    """Before any device is asked for. `host` is this process' address for the others. Raises `EngineDeadError`."""
    # grpc would ask a proxy of the environment for the loopback too.
    os.environ["no_grpc_proxy"] = "127.0.0.1"  # noqa: SIM112 - that is how grpc calls it
    jax.config.update("jax_check_proxy_envs", False)
    # It would catch SIGTERM, which is not the engine's to act on.
    jax.config.update("jax_enable_preemption_service", False)
    address = f"127.0.0.1:{coordinator_port}"
    try:
        jax.distributed.initialize(
            address,
            count,
            rank,
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, round(timeout)),
            coordinator_bind_address=address,
        )
    except RuntimeError as error:
        raise EngineDeadError(f"jax's processes don't find each other: {error}") from error
    collectives = _jax.make_gloo_tcp_collectives(
        distributed_client=distributed.global_state.client,
        hostname=host,
    )
    make_client: Any = functools.partial(xla_bridge.make_cpu_client, collectives)
    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def settle(mesh: Mesh) -> None:
    """Have jax find out which of its devices belong to this process: it does so when first asked, and crashes where two
    threads ask at once (seen with 0.11.2)."""
    NamedSharding(mesh, PartitionSpec()).addressable_devices_indices_map((1,))


def devices_of_all(devices: Sequence[Any], each: int, count: int) -> list[Any]:
    """The first `each` devices of every process, by process. Raises `ConfigError` where one has fewer."""
    by_process: list[list[Any]] = [[] for _ in range(count)]
    for device in devices:
        by_process[device.process_index].append(device)
    for rank, own in enumerate(by_process):
        if len(own) < each:
            raise ConfigError(
                f"node rank {rank} has {len(own)} devices, and each of nnodes={count} needs {each} for this tp_size "
                "and dp_size (on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count makes some up)"
            )
    return [device for own in by_process for device in own[:each]]
