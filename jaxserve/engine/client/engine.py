"""The interface of an engine: requests go in, and a stream of events per request comes out.

`launch_engine` starts a server's `Engine`: one process, or several replicas behind the same interface. For use without
a server, `InProcessEngine` runs an engine in the caller's thread and `SharedEngine` shares it between threads. None of
them knows text, HTTP or the device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from jaxserve.api_types import EngineInfo, EngineRequest, EngineStats, ProfileInfo, ReplicaStats
from jaxserve.config.data_parallel import resolve_dp_mode
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.client.async_client import EngineClient
from jaxserve.engine.client.engine_processes import WORKER_MODULE, EngineProcesses, run_to_completion
from jaxserve.engine.client.placements import PlacementBroadcast
from jaxserve.engine.client.replicas import Replicas
from jaxserve.engine.client.stream import RequestStream
from jaxserve.engine.process.launch_protocol import EngineEndpoint
from jaxserve.engine.process.supervisor import EngineProcess
from jaxserve.errors import JaxserveError

_FOLLOWER_STOP_TIMEOUT = 5.0


class Engine(Protocol):
    """The engine as a server uses it, on one asyncio loop. `EngineClient` documents the methods and their errors.

    `stats` is the last reading; `on_death` resolves with the reason when an engine process ends unexpectedly.
    """

    info: EngineInfo
    on_death: asyncio.Future[str]

    @property
    def stats(self) -> EngineStats: ...

    @property
    def replicas(self) -> tuple[ReplicaStats, ...]: ...

    @property
    def health(self) -> str | None: ...

    def submit(self, request: EngineRequest) -> RequestStream: ...

    def submit_all(self, requests: Sequence[EngineRequest]) -> list[RequestStream]: ...

    def abort(self, request_ids: Iterable[str]) -> None: ...

    async def refresh_stats(self, timeout: float = ...) -> EngineStats: ...

    async def flush_cache(self, timeout: float = ...) -> int: ...

    async def start_profile(
        self, output_dir: str | None = None, *, num_steps: int | None = None, with_stack: bool = False
    ) -> ProfileInfo: ...

    async def stop_profile(self) -> ProfileInfo: ...

    def end(self, reason: str) -> None: ...

    async def shutdown(self) -> None: ...


async def launch_engine(config: EngineConfig, *, module: str = WORKER_MODULE) -> Engine:
    """Start the engine processes that `--dp-mode` requires and wait until they are ready.

    `shutdown` ends them. Raise the errors of `EngineProcesses.launch`.
    """
    processes = await EngineProcesses.launch(config, module=module)
    try:
        return await attach_engine(processes.endpoints, config, processes=processes)
    except BaseException:
        await run_to_completion(processes.shutdown(timeout=0.0))
        raise


async def attach_engine(
    endpoints: Sequence[EngineEndpoint],
    config: EngineConfig,
    *,
    client: int = 0,
    processes: EngineProcesses | None = None,
    broadcast: PlacementBroadcast | None = None,
) -> Engine:
    """Return the client number `client` of a running engine, or of all its replicas; see `Replicas.attach`."""
    if len(endpoints) > 1:
        return await Replicas.attach(endpoints, config, client=client, processes=processes, broadcast=broadcast)
    return EngineClient(endpoints[0], config, client=client, processes=processes)


async def launch_follower(config: EngineConfig, *, module: str = WORKER_MODULE) -> EngineProcess:
    """Start the engine process of a node with a rank above 0 and wait until it is ready.

    Raise the errors of `launch_engine`; then no process is left.
    """
    process = EngineProcess(resolve_dp_mode(config), module)
    try:
        await process.started()
    except JaxserveError:
        await process.stop(timeout=_FOLLOWER_STOP_TIMEOUT)  # time to tell the other nodes
        raise
    except BaseException:
        await process.stop(timeout=0.0)
        raise
    return process
