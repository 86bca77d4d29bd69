"""The engine in the caller's process, for several threads: the one that waits for events runs the next step.

Owns the lock that keeps steps apart, and a queue of events for each call. All calls share one running batch, and one
that pauses, as a stream may, delays no other.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxserve.api_types import EngineInfo, EngineRequest, Profile, TokenEvent
from jaxserve.engine.client.in_process import InProcessEngine


class SharedEngine:
    """`engine`, which must be idle, with its methods for many threads. What each returns and raises, it says."""

    def __init__(self, engine: InProcessEngine) -> None:
        self.info: EngineInfo = engine.info
        self.engine = engine
        # A thread waits for its turn with `_turn` held, so that none takes the lock twice while another waits.
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._queues: dict[str, list[TokenEvent]] = {}

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with _interrupts_held():
            with self._turn:
                self._lock.acquire()
            try:
                yield
            finally:
                self._lock.release()

    def submit(self, requests: Sequence[EngineRequest]) -> Callable[[], list[TokenEvent]]:
        """Hand requests over. The function that is returned waits for events of these, and raises what a step raises.

        Raises `InvalidRequestError` when an id is open; then none of them is.
        """
        queue: list[TokenEvent] = []
        with self._alone():
            begun: list[str] = []
            try:
                for request in requests:
                    self.engine.submit(request)
                    begun.append(request.request_id)
            except BaseException:
                self.engine.abort(begun)
                raise
            self._queues.update(dict.fromkeys(begun, queue))

        def wait() -> list[TokenEvent]:
            while True:
                with self._alone():
                    if not queue:
                        self._step()
                    if queue:
                        events, queue[:] = list(queue), []
                        return events

        return wait

    def _step(self) -> None:
        for event in self.engine.step():
            queue = self._queues.get(event.request_id)
            if queue is not None:
                queue.append(event)
                if event.finish_reason is not None:
                    del self._queues[event.request_id]

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; their last events come to those who still wait for them."""
        with self._alone():
            self.engine.abort(request_ids)

    def forget(self, request_ids: Iterable[str]) -> None:
        """End requests, and drop what events they still bring."""
        with self._alone():
            open_ids = [request_id for request_id in request_ids if self._queues.pop(request_id, None) is not None]
            self.engine.abort(open_ids)

    def flush_cache(self) -> int:
        """Forget every cached prefix; returns the pages given back."""
        with self._alone():
            return self.engine.flush_cache()

    def start_profile(self, output_dir: str | None, *, num_steps: int | None, with_stack: bool) -> Profile:
        """Record a profile from the next step on."""
        with self._alone():
            return self.engine.start_profile(output_dir, num_steps=num_steps, with_stack=with_stack)

    def stop_profile(self) -> Profile:
        """End the profile and wait until it is written."""
        with self._alone():
            return self.engine.stop_profile()

    def close(self) -> None:
        """Let go of the engine. Calls that are open in other threads raise `EngineDeadError`."""
        with self._alone():
            self.engine.close()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let Ctrl-C take effect after a step, not within: a step that is cut short would leave the engine in pieces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)
