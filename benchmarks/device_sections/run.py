"""The interface of a section: its rows, its time limit, the rows of earlier sections, and its parts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

# A check of `compare` is started only with this much time left.
_SECONDS_A_CHECK = 5
_NOT_TRIED = "not tried"


@dataclasses.dataclass(frozen=True)
class SectionRun:
    """The run of one section, or of a `part` of it. `rows` is the file of all rows so far.

    `cache` is the folder for compiled programs, which sections and calls share. `tiny` requests a dry run of a few
    seconds.
    """

    section: str
    rows: Path
    cache: Path
    end: float
    tiny: bool
    part: str = ""

    @property
    def left(self) -> float:
        """The seconds left to the section."""
        return self.end - time.monotonic()

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
        """Append a figure, with the reference to compare it with and its prediction."""
        found = {"section": self.section, "name": name, "value": value, "unit": unit}
        compared = {"reference": reference, "goal": goal, "predicted": predicted}
        with self.rows.open("a") as file:
            file.write(json.dumps({**found, **compared, "note": note}) + "\n")

    def found(self, name: str) -> float | None:
        """Return a figure of an earlier section, or None if it is missing."""
        rows = map(json.loads, self.rows.read_text().splitlines())
        return next((row["value"] for row in rows if row["name"] == name), None)

    @contextlib.contextmanager
    def reporting(self, label: str) -> Iterator[None]:
        """Report an error of the block in a row of its own instead of raising it."""
        try:
            yield
        except Exception as error:  # the errors of compilers have no common base class
            self.row(f"{label}: failed", 0, "", goal=1, note=first_line(error))

    def in_processes(self, parts: Sequence[str]) -> None:
        """Run the section once for each part, each in a process of its own, several at once.

        After a fault of CUDA, all later work of its process fails. Raises `RuntimeError` if a part failed.
        """
        base = [sys.executable, sys.argv[0], "--section", self.section, "--rows", str(self.rows)]
        base += ["--cache", str(self.cache), "--seconds", str(self.left), *(["--interpret-tiny"] if self.tiny else [])]
        shared = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

        def run(part: str) -> int:
            return subprocess.run([*base, "--part", part], env=shared, check=False).returncode

        with ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 4)) as pool:
            failed = [f"{part} ({code})" for part, code in zip(parts, pool.map(run, parts)) if code != 0]
        if failed:
            raise RuntimeError(f"parts that failed, with their exit codes: {', '.join(failed)}")

    def compare(self, label: str, checks: Mapping[str, Callable[[], str | None]], refused: int) -> None:
        """Run checks, which return the fault that they found, in threads, as each compiles; report how many passed."""

        def run(name: str) -> str | None:
            if self.left < _SECONDS_A_CHECK:
                return _NOT_TRIED
            try:
                return checks[name]()
            except Exception as error:  # the errors of compilers have no common base class
                return first_line(error)

        names = list(checks)[: 2 if self.tiny else None]
        # Interpreters of kernels share state.
        threads = 1 if self.device.platform == "cpu" else os.cpu_count()
        with ThreadPoolExecutor(threads) as pool:
            faults = dict(zip(names, pool.map(run, names)))
        skipped = len(checks) - len(names) + list(faults.values()).count(_NOT_TRIED)
        wrong = {name: fault for name, fault in faults.items() if fault not in (None, _NOT_TRIED)}
        tried = len(checks) - skipped
        note = f"{refused} refused, {skipped} not tried"
        self.row(f"{label}: cases right", tried - len(wrong), "cases", reference=tried or None, goal=1, note=note)
        for name, fault in wrong.items():
            self.row(f"{label}: wrong", 0, "", note=f"{name}: {fault}")


def first_line(error: Exception) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {str(error).partition('\n')[0][:200]}"


def seconds_per_call(step: Callable[[Any], Any], state: Any, *, calls: int) -> tuple[float, Any]:
    """Return the seconds per `state = step(state)`, in a chain that never waits for the host, and the last state."""
    state = jax.block_until_ready(step(state))
    start = time.perf_counter()
    for _ in range(calls):
        state = step(state)
    state = jax.block_until_ready(state)
    return (time.perf_counter() - start) / calls, state
