"""`jaxserve bench startup`: how long a server takes from the command to ready, with no programs kept and with all.

Cold starts have a program cache of their own each, an empty folder; warm ones find in it what a cold one left. Weights
come from wherever the machine has them; files it read lately it still has in memory, in both.
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

from jaxserve import model_source
from jaxserve.bench.engine.startup import Start, start_once
from jaxserve.cli.bench.report import write_json
from jaxserve.cli.common import flags
from jaxserve.cli.common.parser import HelpFormatter, Parser
from jaxserve.cli.common.table import table
from jaxserve.errors import ConfigError

_NAMES = {
    "total": "from the command to /ready",
    "api": "before the engine's process, and after it stood",
    "engine": "the engine's process, of it:",
    "imports": "  interpreter and imports",
    "device": "  device",
    "model": "  model's config",
    "weights": "  weights (beside state, programs)",
    "state": "  KV cache and state (beside weights, programs)",
    "programs": "  programs: compile or load (beside weights, state)",
}
_OURS = ("program_cache_dir", "disable_program_cache", "programs", "host", "port", "api_key")


def parser() -> Parser:
    """The flags of `jaxserve bench startup`."""
    parser = Parser(prog="jaxserve bench startup", description=__doc__, formatter_class=HelpFormatter)
    group = parser.add_argument_group("starts")
    group.add_argument("--num-cold", type=int, default=1, metavar="N", help="cold starts (default 1)")
    group.add_argument("--num-warm", type=int, default=3, metavar="N", help="warm starts after them (default 3)")
    group.add_argument("--start-timeout", type=float, default=1800.0, metavar="X",
                       help="seconds a start may take (default 1800)")  # fmt: skip
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures there")
    flags.add_settings(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run it; returns the exit code."""
    arguments = parser().parse(argv)
    if arguments.num_cold < 1 or arguments.num_warm < 0:
        raise ConfigError(
            f"--num-cold must be at least 1 and --num-warm at least 0, got {arguments.num_cold}, {arguments.num_warm}"
        )
    loaded = flags.loaded(arguments)
    for value in loaded.values:
        if value.source != "default" and value.setting.name in _OURS:
            raise ConfigError(f"{value.setting.flag} is what the starts themselves set: leave it out")
    # A download is no part of a start that can be repeated.
    model_source.resolve(loaded.engine.model)
    given = {value.setting.name: value.value for value in loaded.values if value.source != "default"}
    starts: dict[str, list[Start]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="jaxserve-startup-") as folder:
        root = Path(folder)
        plan = [("cold", f"programs-{i}") for i in range(arguments.num_cold)]
        for kind, programs in [*plan, *[("warm", "programs-0")] * arguments.num_warm]:
            settings = root / "settings.yaml"
            settings.write_text(json.dumps(given | {"program_cache_dir": str(root / programs)}))
            one = start_once(["--config", str(settings)], root / "server.log", timeout=arguments.start_timeout)
            starts[kind].append(one)
            print(f"{kind} start {len(starts[kind])}: {one.total:.2f} s", file=sys.stderr)
    print(_report(loaded.engine.model, starts))
    if arguments.output_json is not None:
        about = {"model_id": loaded.engine.model, "settings": given}
        write_json(arguments.output_json, about | {kind: _as_json(of_kind) for kind, of_kind in starts.items()})
    return 0


def _as_json(starts: Sequence[Start]) -> dict[str, Any]:
    """Seconds: the medians, and every start."""
    return {"median": _medians(starts), "starts": [dataclasses.asdict(one) for one in starts]} if starts else {}


def _medians(starts: Sequence[Start]) -> dict[str, float]:
    """Seconds by phase, in the order in which they begin."""
    rows = [_phases(one) for one in starts]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def _phases(start: Start) -> dict[str, float]:
    found = {"total": start.total, "api": start.api, **start.engine}
    order = list(_NAMES)
    return dict(sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def _report(model: str, starts: Mapping[str, Sequence[Start]]) -> str:
    """Text for a terminal."""
    measured = {kind: of_kind for kind, of_kind in starts.items() if of_kind}
    medians = {kind: _medians(of_kind) for kind, of_kind in measured.items()}
    head = ["seconds, medians", *(f"{kind} ({len(of_kind)})" for kind, of_kind in measured.items())]
    rows = [
        [_NAMES.get(name, f"  {name}"), *(f"{medians[kind][name]:.2f}" for kind in measured)]
        for name in medians["cold"]
    ]
    counts = ", ".join(
        f"{of_kind[-1].num_compiled_programs} of {of_kind[-1].num_programs} programs compiled in a {kind} start"
        for kind, of_kind in measured.items()
    )
    return f"{model}: {counts}\n\n{table(head, rows)}"
