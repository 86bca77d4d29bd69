"""The interface of a section: its rows, its time limit, and the rows of earlier sections."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class SectionRun:
    """The run of one section. `rows` is the file of all rows so far; `tiny` requests a dry run of a few seconds."""

    section: str
    rows: Path
    end: float
    tiny: bool

    @property
    def left(self) -> float:
        """The seconds left to the section."""
        return self.end - time.monotonic()

    @property
    def cache(self) -> Path:
        """The folder for compiled programs, which the sections of a run share."""
        return self.rows.parent / "programs"

    @property
    def device(self) -> Any:
        """The measured device."""
        return jax.devices()[0]

    def row(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        reference: float | None = None,
        goal: float | None = None,
        predicted: float | None = None,
        note: str = "",
    ) -> None:
        """Append a figure, with the reference to compare it with and what it was predicted to be."""
        found = {"section": self.section, "name": name, "value": value, "unit": unit}
        with self.rows.open("a") as file:
            compared = {"reference": reference, "goal": goal, "predicted": predicted}
            file.write(json.dumps({**found, **compared, "note": note}) + "\n")

    def found(self, name: str) -> float | None:
        """Return a figure of an earlier section, or None if it is missing."""
        rows = map(json.loads, self.rows.read_text().splitlines())
        return next((row["value"] for row in rows if row["name"] == name), None)


def seconds_per_call(step: Callable[[Any], Any], state: Any, *, calls: int) -> tuple[float, Any]:
    """Return the seconds per `state = step(state)`, in a chain that never waits for the host, and the last state."""
    state = jax.block_until_ready(step(state))
    start = time.perf_counter()
    for _ in range(calls):
        state = step(state)
    state = jax.block_until_ready(state)
    return (time.perf_counter() - start) / calls, state
