"""The soft watchdog of an engine process: logs the stacks of its threads when a step takes too long.

It only reports. Whether the engine counts as unhealthy is decided by its clients, which wait for its messages.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

logger = logging.getLogger("jaxserve.engine")

_CHECKS_PER_TIMEOUT = 4


class SoftWatchdog:
    """Expects a step every `timeout` seconds while there is work, or nothing with None.

    Each missing step is logged once. `clock` returns seconds.
    """

    def __init__(self, timeout: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout = timeout
        self._clock = clock
        self._num_steps = 0
        self._waiting_since: float | None = None
        self._reported: float | None = None

    def start(self) -> None:
        """Check from now on, in a thread of its own."""
        if self._timeout is not None:
            threading.Thread(target=self._run, args=(self._timeout,), name="jaxserve-watchdog", daemon=True).start()

    def note(self, num_steps: int, *, has_work: bool) -> None:
        """Note how many steps have finished, and whether another one is expected."""
        if not has_work:
            self._waiting_since = None
        elif self._waiting_since is None or num_steps != self._num_steps:
            self._waiting_since = self._clock()
        self._num_steps = num_steps

    def check(self) -> None:
        """Log the stacks of all threads if a step is missing, unless this was done for the same step."""
        since = self._waiting_since
        if self._timeout is None or since is None or since == self._reported:
            return
        if self._clock() - since > self._timeout:
            self._reported = since
            logger.error(
                "No step finished for %g s while requests are open; the threads of this process:\n%s",
                self._timeout,
                _stacks(),
            )

    def _run(self, timeout: float) -> None:
        while True:
            time.sleep(timeout / _CHECKS_PER_TIMEOUT)
            self.check()


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
    )
