"""The engine as its users see it: requests in, a stream of events for each out.

`launch_engine` gives a server its `Engine`: one process, or several replicas behind the same interface.
`InProcessEngine` runs an engine in the caller's thread, `SharedEngine` for several. None of them knows text, HTTP or
the device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from jaxserve.api_types import EngineInfo, EngineRequest, EngineStats, Profile, ReplicaReading
from jaxserve.config.data_parallel import when_serving
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.client.async_client import WORKER, EngineClient
from jaxserve.engine.client.replicas import Replicas
from jaxserve.engine.client.stream import RequestStream
from jaxserve.engine.process.supervisor import EngineProcess
from jaxserve.errors import JaxserveError

_FOLLOWER_LEAVES_WITHIN = 5.0


class Engine(Protocol):
    """What a server has of its engine, on one asyncio loop. What each method does and raises, `EngineClient` says.

    `stats` is the last reading; `on_death` resolves with the reason when the engine, or a part of it, ends unasked.
    """

    info: EngineInfo
    on_death: asyncio.Future[str]

    @property
    def stats(self) -> EngineStats: ...

    @property
    def replicas(self) -> tuple[ReplicaReading, ...]: ...

    @property
    def health(self) -> str | None: ...

    def submit(self, request: EngineRequest) -> RequestStream: ...

    def submit_all(self, requests: Sequence[EngineRequest]) -> list[RequestStream]: ...

    def abort(self, request_ids: Iterable[str]) -> None: ...

    async def refresh_stats(self, timeout: float = ...) -> EngineStats: ...

    async def flush_cache(self, timeout: float = ...) -> int: ...

    async def start_profile(
        self, output_dir: str | None = None, *, num_steps: int | None = None, with_stack: bool = False
    ) -> Profile: ...

    async def stop_profile(self) -> Profile: ...

    async def shutdown(self) -> None: ...


async def launch_engine(config: EngineConfig, *, module: str = WORKER) -> Engine:
    """Start what `--dp-mode` comes to, and wait until it is ready. Raises as `EngineClient.launch` does."""
    config = when_serving(config)
    if config.dp_mode == "replicas":
        return await Replicas.launch(config, module=module)
    return await EngineClient.launch(config, module=module)


async def launch_follower(config: EngineConfig, *, module: str = WORKER) -> EngineProcess:
    """Start the engine process of a node that follows another's, and wait until it is ready. Raises as `launch_engine`
    does, leaving no process."""
    process = EngineProcess(when_serving(config), module)
    try:
        await process.started()
    except JaxserveError:
        await process.stop(timeout=_FOLLOWER_LEAVES_WITHIN)  # it tells the others first
        raise
    except BaseException:
        await process.stop(timeout=0.0)
        raise
    return process
