"""`jaxserve bench startup`: measures the time from the command to a ready server, with cold and warm program caches.

Each cold start has an empty program cache; warm starts use the cache that a cold start filled. The operating system may
still have the weights in its page cache, in cold starts too.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.bench.engine.startup import StartupTimes, measure_startup
from jaxserve.cli.bench.report import write_json
from jaxserve.cli.common import flags
from jaxserve.cli.common.parser import Parser
from jaxserve.cli.common.table import format_table
from jaxserve.config.model_files import fetch_files
from jaxserve.errors import ConfigError

_NAMES = {
    "total": "from the command to /ready",
    "api": "before the engine process, and after it is ready",
    "engine": "the engine process, of which:",
    "imports": "  interpreter and imports",
    "device": "  device",
    "model": "  model's config",
    "weights": "  weights (beside state, programs)",
    "state": "  KV cache and state (beside weights, programs)",
    "memory": "  memory: programs compiled to size the KV cache",
    "compile": "  programs: compile (on a CPU beside weights, state)",
    "programs": "  programs: load (beside weights, state)",
    "warm_up": "  first runs of all programs",
}
_RESERVED = ("program_cache_dir", "disable_program_cache", "programs", "host", "port", "api_key")


def parser() -> Parser:
    """Return the parser of `jaxserve bench startup`."""
    parser = Parser(prog="jaxserve bench startup", description=__doc__)
    group = parser.add_argument_group("starts")
    group.add_argument("--num-cold", type=int, default=1, metavar="N", help="cold starts (default 1)")
    group.add_argument("--num-warm", type=int, default=3, metavar="N", help="warm starts after them (default 3)")
    group.add_argument("--start-timeout", type=float, default=1800.0, metavar="X",
                       help="maximum seconds of a start (default 1800)")  # fmt: skip
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures to this file")
    flags.add_settings(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return the exit code."""
    arguments = parser().parse(argv)
    if arguments.num_cold < 1 or arguments.num_warm < 0:
        raise ConfigError(
            f"--num-cold must be at least 1 and --num-warm at least 0, got {arguments.num_cold}, {arguments.num_warm}"
        )
    loaded = flags.config_from_arguments(arguments)
    for value in loaded.values:
        if value.source != "default" and value.setting.name in _RESERVED:
            raise ConfigError(f"{value.setting.flag} is set by the benchmark itself: leave it out")
    # Download the model first: a download is not part of a repeatable start.
    fetch_files(loaded.engine)
    given = {value.setting.name: value.value for value in loaded.values if value.source != "default"}
    starts: dict[str, list[StartupTimes]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="jaxserve-startup-") as folder:
        root = Path(folder)
        plan = [("cold", f"programs-{i}") for i in range(arguments.num_cold)]
        for kind, programs in [*plan, *[("warm", "programs-0")] * arguments.num_warm]:
            settings = root / "settings.yaml"
            settings.write_text(json.dumps(given | {"program_cache_dir": str(root / programs)}))
            one = measure_startup(["--config", str(settings)], root / "server.log", timeout=arguments.start_timeout)
            starts[kind].append(one)
            print(f"{kind} start {len(starts[kind])}: {one.total:.2f} s", file=sys.stderr)
    print(_report(loaded.engine.model, starts))
    if arguments.output_json is not None:
        about = {"model_id": loaded.engine.model, "settings": given}
        write_json(arguments.output_json, about | {kind: _as_json(of_kind) for kind, of_kind in starts.items()})
    return 0


def _as_json(starts: Sequence[StartupTimes]) -> dict[str, Any]:
    """Return the medians and every start, in seconds."""
    return {"median": _medians(starts), "starts": [dataclasses.asdict(one) for one in starts]} if starts else {}


def _medians(starts: Sequence[StartupTimes]) -> dict[str, float]:
    """Return the median seconds by phase, in the order in which the phases begin."""
    rows = [_phases(one) for one in starts]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def _phases(start: StartupTimes) -> dict[str, float]:
    found = {"total": start.total, "api": start.api, **start.engine}
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(name: str) -> int:
    return list(_NAMES).index(name) if name in _NAMES else len(_NAMES)


def _report(model: str, starts: Mapping[str, Sequence[StartupTimes]]) -> str:
    """Return the result as text."""
    measured = {kind: of_kind for kind, of_kind in starts.items() if of_kind}
    medians = {kind: _medians(of_kind) for kind, of_kind in measured.items()}
    head = ["seconds, medians", *(f"{kind} ({len(of_kind)})" for kind, of_kind in measured.items())]
    rows = [
        [_NAMES.get(name, f"  {name}"), *(f"{found[name]:.2f}" if name in found else "-" for found in medians.values())]
        for name in sorted({name for found in medians.values() for name in found}, key=_order)
    ]
    counts = ", ".join(
        f"{of_kind[-1].num_compiled_programs} of {of_kind[-1].num_programs} programs compiled in a {kind} start"
        for kind, of_kind in measured.items()
    )
    return f"{model}: {counts}\n\n{format_table(head, rows)}"
