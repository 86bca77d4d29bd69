"""Makes this process one of several that jax runs as one system.

It connects jax to its coordination service through a local port, which `engine/multihost/coordinator_proxy.py` forwards
to process 0. On a CPU it also sets the address by which the other processes' collectives reach this one, as jax would
use the host's name.
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
    """Join the processes, before jax is asked for any device. `host` is the address of this process for the others.

    Raises `EngineDeadError` if they don't all join in time.
    """
    # Else grpc would use a proxy from the environment even for the local port.
    os.environ["no_grpc_proxy"] = "127.0.0.1"  # noqa: SIM112 - grpc spells it so
    jax.config.update("jax_check_proxy_envs", False)
    # The preemption service would catch SIGTERM, on which the engine process must not act.
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
        raise EngineDeadError(f"the {count} processes of this mesh did not connect to each other: {error}") from error
    collectives = _jax.make_gloo_tcp_collectives(
        distributed_client=distributed.global_state.client,
        hostname=host,
    )
    make_client: Any = functools.partial(xla_bridge.make_cpu_client, collectives)
    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def resolve_local_devices(mesh: Mesh) -> None:
    """Have jax compute and cache which devices of the mesh belong to this process.

    Else the first use would, and jax crashes if two threads do so at once (seen with 0.11.2).
    """
    NamedSharding(mesh, PartitionSpec()).addressable_devices_indices_map((1,))


def devices_of_all(devices: Sequence[Any], each: int, count: int) -> list[Any]:
    """Return the first `each` devices of every process, by process. Raises `ConfigError` if a process has fewer."""
    by_process: list[list[Any]] = [[] for _ in range(count)]
    for device in devices:
        by_process[device.process_index].append(device)
    for rank, own in enumerate(by_process):
        if len(own) < each:
            raise ConfigError(
                f"node rank {rank} has {len(own)} devices, and each of nnodes={count} needs {each} for this tp_size, "
                "dp_size and pp_size (on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count simulates them)"
            )
    return [device for own in by_process for device in own[:each]]
