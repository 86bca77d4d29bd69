"""A sweep's folder: the state of each run, and a check that all runs belong to the same sweep.

`sweep.json` identifies the sweep; a run's result is `runs/NAME.json`, or `runs/NAME.failed.json` with the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jaxserve
from jaxserve.bench.sweep.grid import Grid, GridRun
from jaxserve.errors import ConfigError
from jaxserve.host import lock_file

State = Literal["done", "failed", "to do"]

_OUTPUTS = ("summary.json", "summary.csv", "plots.png")


class SweepFolder:
    """The results of a sweep at `path`, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity = path / "sweep.json"
        self._runs = path / "runs"

    @contextlib.contextmanager
    def opened(self, grid: Grid, *, fresh: bool) -> Iterator[None]:
        """Lock the folder for this process. Raises `ConfigError` if another sweep owns it or is running in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as lock:
            if not lock_file(lock, wait=False):
                raise ConfigError(f"another sweep is running in {self.path}; wait for it or choose another --output")
            if fresh:
                self._clear()
            self.check(grid)
            self._runs.mkdir(exist_ok=True)
            write_whole(self._identity, json.dumps(_identity(grid), indent=2) + "\n")
            yield

    def check(self, grid: Grid) -> None:
        """Raise `ConfigError` that names the differences if the folder holds runs of another sweep."""
        if not self._identity.exists():
            if any(self._runs.glob("engine-*")):
                raise ConfigError(
                    f"{self.path} has runs but no sweep.json that identifies their sweep; choose another --output"
                )
            return
        try:
            before = json.loads(self._identity.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{self._identity} is broken ({error}); --fresh starts over") from None
        changes = list(_changes(before, json.loads(json.dumps(_identity(grid)))))
        if changes:
            raise ConfigError(
                f"{self.path} holds runs of another sweep: {'; '.join(changes)}. --fresh deletes them and starts "
                "over; or choose another --output"
            )

    def state(self, run: GridRun) -> State:
        """Return whether a run is done; the next sweep retries failed ones."""
        if self.result_file(run).exists():
            return "done"
        return "failed" if self._failure_file(run).exists() else "to do"

    def result_file(self, run: GridRun) -> Path:
        """Return the path of a run's result."""
        return self._runs / f"{run.name}.json"

    def server_log(self, engine: int) -> Path:
        """Return the log of a setting's server."""
        return self._runs / f"engine-{engine + 1:02d}.server.log"

    def result(self, run: GridRun) -> dict[str, Any]:
        """Return the result of a finished run. Raises `ConfigError` if the file is damaged."""
        path = self.result_file(run)
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} can't be read: {error}; delete it, and the sweep will repeat the run") from None
        return content

    def failure(self, run: GridRun) -> str:
        """Return why a run failed."""
        reason: str = json.loads(self._failure_file(run).read_text(encoding="utf-8"))["reason"]
        return reason

    def succeeded(self, run: GridRun) -> None:
        """Forget an earlier failure: the run has its result now."""
        self._failure_file(run).unlink(missing_ok=True)

    def failed(self, run: GridRun, reason: str) -> None:
        """Record why the run has no result."""
        write_whole(self._failure_file(run), json.dumps({"run": run.name, "reason": reason}, indent=2) + "\n")

    def _failure_file(self, run: GridRun) -> Path:
        return self._runs / f"{run.name}.failed.json"

    def _clear(self) -> None:
        if not self._identity.exists():
            return
        for path in (*self._runs.glob("engine-*"), *(self.path / name for name in _OUTPUTS), self._identity):
            path.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: killed at any time, the process leaves the whole file or none."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _identity(grid: Grid) -> dict[str, Any]:
    """Return what must be equal for two runs to be in one table."""
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs"
    return {"grid": grid.as_json(), "jaxserve": jaxserve.__version__, "machine": machine}


def _changes(before: object, now: object, place: str = "") -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            yield from _changes(before.get(key), now.get(key), f"{place}.{key}" if place else key)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for i, (one, other) in enumerate(zip(before, now), start=1):
            yield from _changes(one, other, f"{place} {i}")
    elif before != now:
        yield f"{place.removeprefix('grid.')} was {_format_change(before)} and is {_format_change(now)}"


def _format_change(value: object) -> str:
    return f"{len(value)} combinations" if isinstance(value, list) and len(value) > 3 else json.dumps(value)
