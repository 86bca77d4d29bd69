"""`jaxserve bench compare`: compares results of the same benchmark and says which differences are beyond noise.

    jaxserve bench compare before.json after.json
    jaxserve bench compare --a before-*.json --b after-*.json --fail-on-regression 5

Reads the JSON of `bench serve`, `bench throughput` and `bench latency`, ours and vLLM's. Ratios are B/A.
"""

from __future__ import annotations

import argparse
import glob
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.cli.common.parser import Parser
from jaxserve.cli.common.table import format_table
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.bench.results.compare import Comparison, ComparisonRow
    from jaxserve.bench.results.run_file import RunFile


def parser() -> Parser:
    """Return the parser of `jaxserve bench compare`."""
    parser = Parser(prog="jaxserve bench compare", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="A.json and B.json: one run a side")
    parser.add_argument("--a", nargs="+", default=[], metavar="FILE", help="runs of side A: files or patterns")
    parser.add_argument("--b", nargs="+", default=[], metavar="FILE", help="runs of side B")
    parser.add_argument("--metrics", metavar="NAMES", help="only these figures, separated by commas")
    parser.add_argument(
        "--confidence",
        type=float,
        metavar="X",
        help="probability that the bounds hold the true ratio (default 0.99)",
    )
    parser.add_argument(
        "--min-difference",
        type=float,
        metavar="PERCENT",
        help="smaller differences get no verdict (default 1, or 5 with one run a side)",
    )
    parser.add_argument("--force", action="store_true", help="compare even if the loads differ")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the comparison to this file")
    parser.add_argument(
        "--fail-on-regression",
        type=float,
        metavar="PERCENT",
        help="exit with 1 if a figure is worse beyond noise by more than this, or more requests failed",
    )
    return parser


def main(argv: list[str]) -> int:
    """Run the command; return 1 if `--fail-on-regression` finds one, else 0."""
    arguments = parser().parse(argv)
    from jaxserve.bench.results.compare import CONFIDENCE, compare

    confidence = CONFIDENCE if arguments.confidence is None else arguments.confidence
    if not 0.5 <= confidence < 1.0:
        raise ConfigError(f"--confidence must be in [0.5, 1), got {confidence}")
    for name in ("min_difference", "fail_on_regression"):
        value = getattr(arguments, name)
        if value is not None and value < 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 0 percent, got {value}")
    a, b = _sides(arguments)
    comparison = compare(
        a,
        b,
        confidence=confidence,
        min_difference=arguments.min_difference,
        metrics=arguments.metrics.split(",") if arguments.metrics else None,
        force=arguments.force,
    )
    print(report(comparison, a, b, confidence))
    if arguments.output_json is not None:
        content = {"a": [run.path for run in a], "b": [run.path for run in b], "confidence": confidence}
        _write(arguments.output_json, json.dumps(content | comparison.as_json(), indent=2) + "\n")
    if arguments.fail_on_regression is None:
        return 0
    regressions = comparison.regressions(arguments.fail_on_regression)
    print("\n".join(f"REGRESSION: {text}" for text in regressions) or "No regression.")
    return 1 if regressions else 0


def report(comparison: Comparison, a: Sequence[RunFile], b: Sequence[RunFile], confidence: float) -> str:
    """Return the comparison as text."""
    header = ("", "A", "B", "B/A", f"{confidence:.0%} within", "B is")
    lines = [f"{name}: {', '.join(run.path for run in side)}" for name, side in (("A", a), ("B", b))]
    lines += ["", format_table(header, [_line(row) for row in comparison.rows], left=(0, 5))]
    whys = dict.fromkeys(row.why for row in comparison.rows if row.why)
    notes = [*comparison.notes, *(f"Can't tell: {why}." for why in whys)]
    notes += [f"Different loads, compared by --force: {text}." for text in comparison.differences]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _line(row: ComparisonRow) -> tuple[str, ...]:
    bounds = "" if row.interval is None else f"{_bound(row.interval.low)} to {_bound(row.interval.high)}"
    return row.metric, f"{row.a:.4g}", f"{row.b:.4g}", f"{row.b / row.a:.3f}", bounds, row.verdict


def _bound(ratio: float) -> str:
    """Format a bound; below 0.1 and above 10 its value is meaningless."""
    return "<0.1" if ratio < 0.1 else ">10" if ratio > 10 else f"{ratio:.3f}"


def _sides(arguments: argparse.Namespace) -> tuple[list[RunFile], list[RunFile]]:
    if arguments.files:
        if arguments.a or arguments.b or len(arguments.files) != 2:
            raise ConfigError(
                f"got {len(arguments.files)} files: give two, A.json and B.json, or several with --a and --b"
            )
        return _read(arguments.files[:1]), _read(arguments.files[1:])
    if not arguments.a or not arguments.b:
        raise ConfigError("there is nothing to compare: give A.json and B.json, or files with --a and --b")
    return _read(arguments.a), _read(arguments.b)


def _read(names: Sequence[str]) -> list[RunFile]:
    from jaxserve.bench.results.run_file import read_runs

    paths = []
    for name in names:
        found = [name] if Path(name).exists() else sorted(glob.glob(name))
        if not found:
            raise ConfigError(f"{name} is not a file, and as a pattern it matches none")
        paths += found
    return [run for path in paths for run in read_runs(Path(path))]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output-json {path} can't be written: {error}") from None
