"""The engine as its users see it: requests in, a stream of events for each out.

`launch_engine` gives a server its `Engine`: one process, or several replicas behind the same interface.
`InProcessEngine` runs an engine in the caller's thread. None of them knows text, HTTP or the device.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Iterable, Sequence
from typing import Protocol

from jaxserve.api_types import EngineInfo, EngineRequest, EngineStats, Profile, ReplicaReading, TokenEvent
from jaxserve.config.data_parallel import when_serving
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.child import EngineProcess
from jaxserve.engine.loop import EngineLoop
from jaxserve.engine.remote import WORKER, EngineClient
from jaxserve.engine.replicas import Replicas
from jaxserve.engine.stream import RequestStream
from jaxserve.errors import EngineDeadError, InvalidRequestError, JaxserveError

__all__ = ["Engine", "EngineClient", "InProcessEngine", "launch_engine", "launch_follower"]

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


class InProcessEngine:
    """The engine in the caller's thread: nothing happens except within `step`."""

    def __init__(self, loop: EngineLoop, info: EngineInfo) -> None:
        self.info = info
        self._loop: EngineLoop | None = loop
        self._open: set[str] = set()
        self._events: list[TokenEvent] = []

    @classmethod
    def start(cls, config: EngineConfig, *, module: str = WORKER) -> InProcessEngine:
        """Build an engine by `build_engine` of `module`, which is imported only now: it brings the device with it."""
        loop, info = importlib.import_module(module).build_engine(config)
        return cls(loop, info)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._events) or self._engine.has_work

    def submit(self, request: EngineRequest) -> None:
        """Hand a request over; a refusal comes as its only event. Raises `InvalidRequestError` when its id is open."""
        if request.request_id in self._open:
            raise InvalidRequestError(
                f"a request with the id {request.request_id!r} is open already", param="request_id"
            )
        self._open.add(request.request_id)
        refused = self._engine.add(request)
        if refused is not None:
            self._events.append(refused)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; their last events come with the next step. Ids that are not open are ignored."""
        self._events += self._engine.abort(request_ids)

    def step(self) -> list[TokenEvent]:
        """Run one step and return the events there are. Raises `EngineDeadError` when the step fails."""
        events, self._events = self._events, []
        if self._engine.has_work:
            events += self._engine.step()
        self._open.difference_update(event.request_id for event in events if event.finish_reason is not None)
        return events

    def stats(self) -> EngineStats:
        """A reading of the engine, with its books audited."""
        return self._engine.stats(check=True)

    def flush_cache(self) -> int:
        """Forget every cached prefix; how many pages that gave back."""
        return self._engine.flush_cache()

    def start_profile(
        self, output_dir: str | None = None, *, num_steps: int | None = None, with_stack: bool = False
    ) -> Profile:
        """Record a profile from the next step on. As `EngineClient.start_profile`, as are the errors."""
        return self._engine.profiling.start(output_dir, num_steps=num_steps, with_stack=with_stack)

    def stop_profile(self) -> Profile:
        """End the profile and wait until it is written."""
        return self._engine.profiling.stop().result()

    def close(self) -> None:
        """Let go of the engine and of what it holds on the device. May be repeated."""
        if self._loop is not None:
            with contextlib.suppress(EngineDeadError):
                self._loop.flush()
            self._loop.profiling.close()
            self._loop = None

    @property
    def _engine(self) -> EngineLoop:
        if self._loop is None:
            raise EngineDeadError("the engine has been closed")
        return self._loop
