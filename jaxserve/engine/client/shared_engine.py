"""An in-process engine for several threads: a thread that waits for events runs the next step itself.

It owns the lock around steps, and a queue of events for each call. All calls share one running batch, and a call that
pauses, such as a slow stream, does not delay the others.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxserve.api_types import EngineInfo, EngineRequest, ProfileInfo, TokenEvent
from jaxserve.engine.client.in_process import InProcessEngine, check_not_forked, is_forked


class SharedEngine:
    """Gives several threads the methods of `engine`, which must be idle; `InProcessEngine` documents their errors.

    In a forked process, `discard` does nothing, and all others raise `ForkedProcessError`.
    """

    def __init__(self, engine: InProcessEngine) -> None:
        self.info: EngineInfo = engine.info
        self.engine = engine
        # A thread holds `_next` while it waits for `_lock`, so none takes `_lock` twice before a waiting one gets it.
        self._next = threading.Lock()
        self._lock = threading.Lock()
        self._queues: dict[str, list[TokenEvent]] = {}

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        check_not_forked()  # before the locks: a thread of the parent may have held them
        with _interrupts_held():
            with self._next:
                self._lock.acquire()
            try:
                yield
            finally:
                self._lock.release()

    def submit(self, requests: Sequence[EngineRequest]) -> Callable[[], list[TokenEvent]]:
        """Submit requests. The returned function waits for their next events and raises the errors of `step`.

        Raise `InvalidRequestError` if an id is open; then none of the requests is submitted.
        """
        queue: list[TokenEvent] = []
        with self._exclusive():
            submitted: list[str] = []
            try:
                for request in requests:
                    self.engine.submit(request)
                    submitted.append(request.request_id)
            except BaseException:
                self.engine.abort(submitted)
                raise
            self._queues.update(dict.fromkeys(submitted, queue))

        def wait() -> list[TokenEvent]:
            while True:
                with self._exclusive():
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
        """End requests; their calls still receive the last events."""
        with self._exclusive():
            self.engine.abort(request_ids)

    def discard(self, request_ids: Iterable[str]) -> None:
        """End requests and drop their remaining events."""
        if is_forked():
            return
        with self._exclusive():
            open_ids = [request_id for request_id in request_ids if self._queues.pop(request_id, None) is not None]
            self.engine.abort(open_ids)

    def flush_cache(self) -> int:
        """Remove all cached prefixes and return how many pages this freed."""
        with self._exclusive():
            return self.engine.flush_cache()

    def start_profile(self, output_dir: str | None, *, num_steps: int | None, with_stack: bool) -> ProfileInfo:
        """Record a profile from the next step on."""
        with self._exclusive():
            return self.engine.start_profile(output_dir, num_steps=num_steps, with_stack=with_stack)

    def stop_profile(self) -> ProfileInfo:
        """End the profile and wait until it is written."""
        with self._exclusive():
            return self.engine.stop_profile()

    def close(self) -> None:
        """Close the engine. Open calls in other threads raise `EngineDeadError`."""
        with self._exclusive():
            self.engine.close()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C until the end of the step: an interrupted step would leave the engine in an inconsistent state."""
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
