"""`jaxserve bench sweep`: measures every combination of engine flags and loads in a YAML file.

    jaxserve bench sweep grid.yaml --output results --dry-run
    jaxserve bench sweep grid.yaml --output results

Finished runs are kept: after an interruption the same command continues with the rest and retries failed runs. At the
end the folder holds summary.json, summary.csv and plots.png.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.cli.common.dispatch import INTERRUPTED
from jaxserve.cli.common.parser import Parser
from jaxserve.cli.common.table import format_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxserve.bench.sweep.folder import SweepFolder
    from jaxserve.bench.sweep.grid import Grid
    from jaxserve.bench.sweep.run_sweep import BenchCommands
    from jaxserve.bench.sweep.summary import SummaryRow

_SHOWN = (
    "output_throughput",
    "request_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "median_e2el_ms",
)


def parser() -> Parser:
    """Return the parser of `jaxserve bench sweep`."""
    parser = Parser(prog="jaxserve bench sweep", description=__doc__)
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml", help="base, engine, load, repetitions")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="folder for results (default: CONFIG-sweep)",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="delete the results of an earlier sweep in the folder first"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs and their state; start nothing")
    parser.add_argument("--no-png", action="store_true", help="skip plots.png, which needs the extra 'bench'")
    return parser


def main(argv: list[str], commands: BenchCommands | None = None) -> int:
    """Run the command; return 0, 1 if a run failed, 130 after Ctrl-C. `commands` start servers and loads."""
    arguments = parser().parse(argv)
    from jaxserve.bench.sweep.folder import SweepFolder
    from jaxserve.bench.sweep.grid import read_grid
    from jaxserve.bench.sweep.plots import require_matplotlib
    from jaxserve.bench.sweep.run_sweep import BenchCommands, Sweep
    from jaxserve.cli.bench import serve

    grid = read_grid(arguments.config, serve.parser().parse)
    folder = SweepFolder(arguments.output or Path(f"{arguments.config.stem}-sweep"))
    if arguments.dry_run:
        if not arguments.fresh:
            folder.check(grid)
        _list(grid, folder)
        return 0
    if not arguments.no_png:
        require_matplotlib()
    with folder.opened(grid, fresh=arguments.fresh):
        try:
            Sweep(grid, folder, _notify, commands or BenchCommands()).run()
        except KeyboardInterrupt:
            done = sum(folder.state(run) == "done" for run in grid.runs())
            _notify(f"Interrupted: {done} of {len(grid.runs())} runs are done; the same command continues from there.")
            return INTERRUPTED
        rows = _write(grid, folder, png=not arguments.no_png)
    _print(rows, folder)
    return 1 if any(row.reasons for row in rows) else 0


def _list(grid: Grid, folder: SweepFolder) -> None:
    for engine in range(len(grid.engines)):
        print(f"jaxserve serve {' '.join(grid.serve_flags(engine))}")
        for run in grid.runs_of(engine):
            print(f"  {run.name}  {folder.state(run):<6}  jaxserve bench serve {' '.join(grid.load_flags(run))}")
    left = sum(folder.state(run) != "done" for run in grid.runs())
    print(f"{len(grid.engines)} settings x {len(grid.loads)} loads x {grid.repetitions} times; {left} runs to do")


def _write(grid: Grid, folder: SweepFolder, *, png: bool) -> list[SummaryRow]:
    from jaxserve.bench.sweep import plots, summary
    from jaxserve.bench.sweep.folder import write_whole

    rows = summary.summarize(grid, folder)
    write_whole(folder.path / "summary.json", summary.as_json(grid, rows))
    write_whole(folder.path / "summary.csv", summary.as_csv(rows))
    if png:
        plots.write_png(rows, folder.path / "plots.png")
    return rows


def _print(rows: Sequence[SummaryRow], folder: SweepFolder) -> None:
    from jaxserve.bench.sweep.grid import varying_keys
    from jaxserve.bench.sweep.plots import FIGURE_NAMES
    from jaxserve.bench.sweep.summary import LATENCIES, pareto_rows

    settings, options = varying_keys([row.settings for row in rows]), varying_keys([row.options for row in rows])
    best = {i for latency in LATENCIES for i in pareto_rows(rows, latency)}
    names = [name for name in _SHOWN if any(name in row.figures for row in rows)]
    header = [*settings, *options, *(FIGURE_NAMES[name] for name in names), "runs", "failed", ""]
    lines = []
    for i, row in enumerate(rows):
        mark = ("*" if i in best else "") + (" client-bound" if row.client_bound else "")
        figures = [_figure(row, name) for name in names]
        lines.append([*row.option_values(settings, options), *figures, f"{row.runs}", f"{row.failed_requests}", mark])
    num_options = len(settings) + len(options)
    print(format_table(header, lines, left=(*range(num_options), len(header) - 1)))
    print("*: on a Pareto front of output tokens/s against a latency\n")
    for row in rows:
        for reason in row.reasons:
            print(f"FAILED setting {row.engine + 1}, load {row.load + 1}: {reason}")
    print(f"Written to {folder.path}")


def _figure(row: SummaryRow, name: str) -> str:
    if name not in row.figures:
        return ""
    value = row.figures[name]
    decimals = 0 if value >= 1000 else 1 if value >= 100 else 2
    spread = f" ± {row.spreads[name]:.{decimals}f}" if name in row.spreads else ""
    return f"{value:.{decimals}f}{spread}"


def _notify(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
