"""The engine in the caller's process: nothing happens except within `step`."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable

from jaxserve.api_types import EngineInfo, EngineRequest, EngineStats, Profile, TokenEvent
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.client.async_client import WORKER
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.errors import EngineDeadError, InvalidRequestError


class InProcessEngine:
    """An engine that belongs to one thread at a time."""

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
