"""What a section is given: where its rows go, how long it may take, and what the sections before it found."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Run:
    """`rows` is the file of all rows so far; `tiny` asks for a dry run that is over in seconds."""

    rows: Path
    end: float
    tiny: bool

    @property
    def left(self) -> float:
        """Seconds that are left to the section."""
        return self.end - time.monotonic()

    @property
    def device(self) -> Any:
        """The device that is measured."""
        return jax.devices()[0]

    def row(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        reference: float | None = None,
        goal: float | None = None,
        note: str = "",
    ) -> None:
        """Keep a figure, beside what it is held against."""
        section = sys._getframe(1).f_globals["__name__"].rpartition(".")[2]
        found = {"section": section, "name": name, "value": value, "unit": unit}
        with self.rows.open("a") as file:
            file.write(json.dumps({**found, "reference": reference, "goal": goal, "note": note}) + "\n")

    def found(self, name: str) -> float | None:
        """A figure of a section before, if it got that far."""
        rows = map(json.loads, self.rows.read_text().splitlines())
        return next((row["value"] for row in rows if row["name"] == name), None)


def seconds_per_call(step: Callable[[Any], Any], state: Any, *, calls: int) -> tuple[float, Any]:
    """Time of `state = step(state)` in a chain that the device runs without waiting for the host."""
    state = jax.block_until_ready(step(state))
    start = time.perf_counter()
    for _ in range(calls):
        state = step(state)
    state = jax.block_until_ready(state)
    return (time.perf_counter() - start) / calls, state
