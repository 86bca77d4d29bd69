"""An engine in the caller's process; it runs only while the caller is in `step`."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
from collections.abc import Iterable

from jaxserve import host
from jaxserve.api_types import EngineInfo, EngineRequest, EngineStats, ProfileInfo, TokenEvent
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.client.engine_processes import WORKER_MODULE
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.errors import EngineDeadError, ForkedProcessError, InvalidRequestError


class InProcessEngine:
    """An engine that one thread at a time may use."""

    def __init__(self, loop: EngineLoop, info: EngineInfo) -> None:
        self.info = info
        self._loop: EngineLoop | None = loop
        self._open: set[str] = set()
        self._events: list[TokenEvent] = []

    @classmethod
    def start(cls, config: EngineConfig, *, module: str = WORKER_MODULE) -> InProcessEngine:
        """Build an engine with `build_engine` of `module`, which is imported here because it imports jax.

        Raise `ForkedProcessError` in a child of a process that has started one.
        """
        check_not_forked()
        loop, info = importlib.import_module(module).build_engine(config)
        return cls(loop, info)

    @property
    def has_work(self) -> bool:
        """Whether `step` has work to do or events to return."""
        return bool(self._events) or self._engine.has_work

    def submit(self, request: EngineRequest) -> None:
        """Submit a request; a rejection is its only event. Raise `InvalidRequestError` if its id is open."""
        if request.request_id in self._open:
            raise InvalidRequestError(
                f"a request with the id {request.request_id!r} is open already", param="request_id"
            )
        self._open.add(request.request_id)
        refused = self._engine.add(request)
        if refused is not None:
            self._events.append(refused)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; the next step returns their last events. Ignore ids that are not open."""
        self._events += self._engine.abort(request_ids)

    def step(self) -> list[TokenEvent]:
        """Run one step and return all new events. Raise `EngineDeadError` if the step fails."""
        events, self._events = self._events, []
        if self._engine.has_work:
            events += self._engine.step()
        self._open.difference_update(event.request_id for event in events if event.finish_reason is not None)
        return events

    def stats(self) -> EngineStats:
        """Return the engine's counters and sizes, with integrity errors."""
        return self._engine.stats(check=True)

    def flush_cache(self) -> int:
        """Remove all cached prefixes and return how many pages this freed."""
        return self._engine.flush_cache()

    def start_profile(
        self, output_dir: str | None = None, *, num_steps: int | None = None, with_stack: bool = False
    ) -> ProfileInfo:
        """Record a profile from the next step on. Arguments and errors are those of `EngineClient.start_profile`."""
        return self._engine.profiling.start(output_dir, num_steps=num_steps, with_stack=with_stack)

    def stop_profile(self) -> ProfileInfo:
        """End the profile and wait until it is written."""
        return self._engine.profiling.stop().result()

    def close(self) -> None:
        """Close the engine and return its memory to the system. May be called again."""
        if self._loop is not None:
            with contextlib.suppress(EngineDeadError):
                self._loop.flush()
            self._loop.profiling.close()
            self._loop = None
            gc.collect()  # weights and programs are in reference cycles
            host.return_free_memory()

    @property
    def _engine(self) -> EngineLoop:
        if self._loop is None:
            raise EngineDeadError("the engine has been closed")
        return self._loop


@functools.cache
def _process_of_engines() -> int:
    """Return the process that first asked, which is where engines run."""
    return os.getpid()


def is_forked() -> bool:
    """Return whether this process was forked from one that has started an engine."""
    return os.getpid() != _process_of_engines()


def check_not_forked() -> None:
    """Raise `ForkedProcessError` in a forked process: the threads of JAX don't exist there, and a step would hang."""
    if is_forked():
        raise ForkedProcessError(
            f"process {os.getpid()} was forked from process {_process_of_engines()}, which has started an engine: "
            "engines can't be used or started here. Use the LLM in that process only, or start this one by "
            'multiprocessing\'s "spawn" and create an LLM in it'
        )
