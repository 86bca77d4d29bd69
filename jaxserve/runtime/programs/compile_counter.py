"""Counts what jax compiles, to show that a server compiles nothing once it is ready."""

from __future__ import annotations

from typing import Any

import jax


class CompileCounter:
    """The number of programs that jax has compiled in this process since the counter was made."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1
