"""What the engine's thread does when, as named spans that go nowhere until somebody watches.

It owns the names and the switch. Who watches, and what becomes of a span, is the watcher's: a profiler's annotations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

HOST_PHASES = ("plan", "build", "dispatch", "wait", "commit", "serialize")
"""Of a step: decide it, make its input, start it, wait for its tokens, book them, tell the clients."""

type Span = Callable[[str], AbstractContextManager[object]]

_NOTHING = contextlib.nullcontext()


def _unwatched(_: str) -> AbstractContextManager[object]:
    return _NOTHING


class Timeline:
    """`with timeline.span("plan"): …` around each phase of a step; unwatched, it costs less than a microsecond."""

    def __init__(self) -> None:
        self.span: Span = _unwatched

    def watch(self, span: Span) -> None:
        """From the next span on, enter what `span` makes of its name."""
        self.span = span

    def unwatch(self) -> None:
        """From the next span on, nothing is made any more."""
        self.span = _unwatched
