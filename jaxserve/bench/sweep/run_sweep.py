"""Runs a grid: starts one server per engine setting and runs all loads on it. The folder keeps finished runs.

A run or a server that fails is recorded with its reason, and the sweep continues.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxserve.bench.processes.measure import measure
from jaxserve.bench.processes.server_process import BENCH_SERVE, SERVE, ServerProcess, serving
from jaxserve.bench.sweep.folder import SweepFolder
from jaxserve.bench.sweep.grid import Grid, GridRun, Options
from jaxserve.errors import BenchRunError


@dataclasses.dataclass(frozen=True)
class BenchCommands:
    """The commands that start a server and a load."""

    serve: Sequence[str] = SERVE
    bench_serve: Sequence[str] = BENCH_SERVE


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A grid and the folder of its runs; `notify` receives progress lines. The caller must hold the folder open."""

    grid: Grid
    folder: SweepFolder
    notify: Callable[[str], None]
    commands: BenchCommands = dataclasses.field(default_factory=BenchCommands)

    def run(self) -> None:
        """Run everything that has no result yet. A run that Ctrl-C ends has none, so the next call repeats it."""
        for engine in range(len(self.grid.engines)):
            runs = [run for run in self.grid.runs_of(engine) if self.folder.state(run) != "done"]
            while runs:
                runs = self._run_on_one_server(engine, runs)

    def _run_on_one_server(self, engine: int, runs: list[GridRun]) -> list[GridRun]:
        """Run all of `runs` on one server; return the runs that are left if the server ends early."""
        grid = self.grid
        self._notify(f"starting setting {engine + 1} of {len(grid.engines)}: {format_options(grid.engines[engine])}")
        flags, log = grid.serve_flags(engine), self.folder.server_log(engine)
        left = list(runs)
        try:
            with serving(flags, log, timeout=grid.start_timeout, command=self.commands.serve) as server:
                while left and server.is_alive:
                    self._run_one(left.pop(0), server)
        except BenchRunError as error:
            for run in left:
                self.folder.failed(run, str(error))
            self._notify(f"FAILED, with its {len(left)} runs: {error}")
            return []
        return left

    def _run_one(self, run: GridRun, server: ServerProcess) -> None:
        self._notify(f"{run.name}: {format_options(self.grid.varying_load(run.load))}")
        flags, file = self.grid.load_flags(run), self.folder.result_file(run)
        try:
            measure(server, flags, file, timeout=self.grid.run_timeout, command=self.commands.bench_serve)
        except BenchRunError as error:
            self.folder.failed(run, str(error))
            self._notify(f"FAILED {run.name}: {error}")
        else:
            self.folder.succeeded(run)

    def _notify(self, text: str) -> None:
        runs = self.grid.runs()
        done = sum(self.folder.state(run) == "done" for run in runs)
        self.notify(f"[{done}/{len(runs)}] {text}")


def format_options(options: Options) -> str:
    """Return the options on one line."""
    return ", ".join(f"{key}={value}" for key, value in options.items()) or "as given"
