"""Summarizes a sweep: a row for each setting and load, with means and standard deviations over its repetitions.

Owns the contents of summary.json and summary.csv. The report and the plots choose from the rows what they show.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.bench.results.run_file import LATENCY_METRICS
from jaxserve.bench.sweep.folder import SweepFolder
from jaxserve.bench.sweep.grid import Grid, GridRun, format_value, varying_keys
from jaxserve.bench.sweep.pareto import pareto_front

THROUGHPUT = "output_throughput"
LATENCIES = tuple(
    f"{statistic}_{name}_ms" for name in LATENCY_METRICS if name != "itl" for statistic in ("median", "p99")
)
FIGURES = (THROUGHPUT, "request_throughput", "total_token_throughput", "request_goodput", *LATENCIES, "p99_itl_ms")


@dataclasses.dataclass(frozen=True)
class SummaryRow:
    """One setting under one load. `figures` are means over the finished runs, `spreads` their standard deviations (from
    two runs on); a figure that any run lacks is left out. `failed_requests` is the total over all runs, `reasons` are
    the errors of failed runs, and `client_bound` says whether the load client was the bottleneck in any run."""

    engine: int
    load: int
    settings: Mapping[str, Any]
    options: Mapping[str, Any]
    runs: int
    figures: Mapping[str, float]
    spreads: Mapping[str, float]
    failed_requests: int
    reasons: tuple[str, ...]
    client_bound: bool

    @property
    def label(self) -> str:
        """The setting's name in a legend."""
        return ", ".join(f"{key}={format_value(value)}" for key, value in self.settings.items()) or "base"

    def option_values(self, settings: Sequence[str], options: Sequence[str]) -> list[str]:
        """Return the values of these settings and load options as text, with "" for absent ones."""
        pairs = [*((self.settings, key) for key in settings), *((self.options, key) for key in options)]
        return [format_value(values.get(key, "")) for values, key in pairs]


def summarize(grid: Grid, folder: SweepFolder) -> list[SummaryRow]:
    """Return a row for each setting and load, in the grid's order."""
    pairs = [(engine, load) for engine in range(len(grid.engines)) for load in range(len(grid.loads))]
    return [_row(grid, folder, engine, load) for engine, load in pairs]


def pareto_rows(rows: Sequence[SummaryRow], latency: str) -> list[int]:
    """Return the indices of the rows on the Pareto front of output throughput and this latency, by rising latency."""
    having = [i for i, row in enumerate(rows) if latency in row.figures and THROUGHPUT in row.figures]
    latencies, rates = ([rows[i].figures[name] for i in having] for name in (latency, THROUGHPUT))
    return [having[i] for i in pareto_front(latencies, rates)]


def as_json(grid: Grid, rows: Sequence[SummaryRow]) -> str:
    """Return the content of summary.json."""
    content = {
        "base": grid.base,
        "repetitions": grid.repetitions,
        "rows": [dataclasses.asdict(row) for row in rows],
        "pareto": {latency: pareto_rows(rows, latency) for latency in LATENCIES},
    }
    return json.dumps(content, indent=2) + "\n"


def as_csv(rows: Sequence[SummaryRow]) -> str:
    """Return the content of summary.csv."""
    settings, options = varying_keys([row.settings for row in rows]), varying_keys([row.options for row in rows])
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    spreads = [f"{name}_std" for name in FIGURES]
    head = ["engine", "load", *settings, *options, "runs", "failed_requests", *FIGURES, *spreads, "failure"]
    writer.writerow(head)
    for row in rows:
        own = row.option_values(settings, options)
        figures = [row.figures.get(name, "") for name in FIGURES] + [row.spreads.get(name, "") for name in FIGURES]
        reasons = " / ".join(row.reasons)
        writer.writerow([row.engine + 1, row.load + 1, *own, row.runs, row.failed_requests, *figures, reasons])
    return text.getvalue()


def _row(grid: Grid, folder: SweepFolder, engine: int, load: int) -> SummaryRow:
    runs = [GridRun(engine, load, turn + 1) for turn in range(grid.repetitions)]
    results = [folder.result(run) for run in runs if folder.state(run) == "done"]
    values = {name: [result[name] for result in results if result.get(name) is not None] for name in FIGURES}
    whole = {name: found for name, found in values.items() if found and len(found) == len(results)}
    return SummaryRow(
        engine=engine,
        load=load,
        settings=grid.engines[engine],
        options=grid.loads[load],
        runs=len(results),
        figures={name: statistics.fmean(found) for name, found in whole.items()},
        spreads={name: statistics.stdev(found) for name, found in whole.items() if len(found) > 1},
        failed_requests=sum(result.get("failed", 0) for result in results),
        reasons=tuple(dict.fromkeys(folder.failure(run) for run in runs if folder.state(run) == "failed")),
        client_bound=any(result.get("client", {}).get("bottleneck") for result in results),
    )
