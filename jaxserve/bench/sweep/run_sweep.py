"""Runs a grid: for each setting one server, all loads on it. What is done lies in the folder, so it can be resumed.

A run or a server that fails is recorded with its reason and the sweep goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxserve.bench.processes.measure import measure
from jaxserve.bench.processes.server_process import BENCH_SERVE, SERVE, Server, serving
from jaxserve.bench.sweep.folder import SweepFolder
from jaxserve.bench.sweep.grid import Grid, Options, Run
from jaxserve.errors import BenchRunError


@dataclasses.dataclass(frozen=True)
class Commands:
    """How a server and a load are started."""

    serve: Sequence[str] = SERVE
    bench_serve: Sequence[str] = BENCH_SERVE


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A grid and where its runs lie; `say` is told what happens. The caller holds the folder."""

    grid: Grid
    folder: SweepFolder
    say: Callable[[str], None]
    commands: Commands = dataclasses.field(default_factory=Commands)

    def run(self) -> None:
        """Run all that has no result yet. What Ctrl-C ends has none, and is done by the next call."""
        for engine in range(len(self.grid.engines)):
            runs = [run for run in self.grid.runs_of(engine) if self.folder.state(run) != "done"]
            while runs:
                runs = self._with_one_server(engine, runs)

    def _with_one_server(self, engine: int, runs: list[Run]) -> list[Run]:
        """Do these runs; returns those that are left when the server ended on the way."""
        grid = self.grid
        self._say(f"starting setting {engine + 1} of {len(grid.engines)}: {described(grid.engines[engine])}")
        flags, log = grid.serve_flags(engine), self.folder.server_log(engine)
        left = list(runs)
        try:
            with serving(flags, log, timeout=grid.start_timeout, command=self.commands.serve) as server:
                while left and server.is_alive:
                    self._one(left.pop(0), server)
        except BenchRunError as error:
            for run in left:
                self.folder.failed(run, str(error))
            self._say(f"FAILED, with its {len(left)} runs: {error}")
            return []
        return left

    def _one(self, run: Run, server: Server) -> None:
        self._say(f"{run.name}: {described(self.grid.varying_load(run.load))}")
        flags, file = self.grid.load_flags(run), self.folder.result_file(run)
        try:
            measure(server, flags, file, timeout=self.grid.run_timeout, command=self.commands.bench_serve)
        except BenchRunError as error:
            self.folder.failed(run, str(error))
            self._say(f"FAILED {run.name}: {error}")
        else:
            self.folder.succeeded(run)

    def _say(self, text: str) -> None:
        runs = self.grid.runs()
        done = sum(self.folder.state(run) == "done" for run in runs)
        self.say(f"[{done}/{len(runs)}] {text}")


def described(options: Options) -> str:
    """Options on one line."""
    return ", ".join(f"{key}={value}" for key, value in options.items()) or "as given"
