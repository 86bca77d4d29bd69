"""Marks what the engine's thread does as named spans, which are recorded only while a profiler watches.

Owns the names of the spans and the switch. The watcher decides what a span does, such as writing a profiler annotation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

HOST_PHASES = ("plan", "build", "dispatch", "wait", "commit", "serialize")
"""The phases of a step: decide on it, build its input, start it, wait for its tokens, record them, send them out."""

type Span = Callable[[str], AbstractContextManager[object]]

_NO_SPAN = contextlib.nullcontext()


def _no_span(_: str) -> AbstractContextManager[object]:
    return _NO_SPAN


class Timeline:
    """Marks each phase of a step by `with timeline.span("plan"): …`.

    A span costs less than a microsecond while nothing watches.
    """

    def __init__(self) -> None:
        self.span: Span = _no_span

    def watch(self, span: Span) -> None:
        """From the next span on, enter the context manager that `span` returns for its name."""
        self.span = span

    def unwatch(self) -> None:
        """From the next span on, record nothing."""
        self.span = _no_span
