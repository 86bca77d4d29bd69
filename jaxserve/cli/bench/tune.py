"""`jaxserve bench tune`: finds settings for a load by measured runs and writes them as a profile for `--config`.

    jaxserve bench tune --goal throughput --minutes 20 --output tuned.yaml \\
        -- --dataset-name random --num-prompts 64 --max-concurrency 16 --ignore-eos
    jaxserve bench tune --config configs/cpu.yaml --goal latency --limit ttft:200 tpot:50 -- --request-rate 4
    jaxserve serve --config tuned.yaml

Before `--` give the goal and fixed settings with the flags of `jaxserve serve`; after it the load with the flags of
`jaxserve bench serve`. The command tries max_running_requests, chunked_prefill_size, schedule_policy,
schedule_conservativeness and cuda_graph_bs, each only if it can matter for the load.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.cli.common import flags
from jaxserve.cli.common.dispatch import INTERRUPTED
from jaxserve.cli.common.parser import Parser
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.bench.sweep.run_sweep import BenchCommands

# The first requests of a new server are slower: they touch its memory for the first time.
_WARMUPS = 4


class _TuneParser(Parser):
    """Keeps the arguments after `--` unparsed as `load`."""

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        cut = argv.index("--") if "--" in argv else len(argv)
        arguments = super().parse(argv[:cut])
        arguments.load = list(argv[cut + 1 :])
        return arguments


def parser() -> Parser:
    """Return the parser of `jaxserve bench tune`."""
    parser = _TuneParser(prog="jaxserve bench tune", description=__doc__)
    flags.add_model(parser)
    parser.add_argument(
        "--goal",
        choices=("throughput", "latency"),
        required=True,
        help="throughput: output tokens per second; latency: requests per second that meet every --limit",
    )
    parser.add_argument(
        "--limit", nargs="+", default=[], metavar="METRIC:MS", help="limits in milliseconds on ttft, tpot, e2el"
    )
    parser.add_argument("--minutes", type=float, default=15.0, metavar="X", help="time budget (default 15)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("tuned.yaml"),
        metavar="FILE",
        help="profile file (default tuned.yaml)",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        metavar="FOLDER",
        help="folder for results and logs (default: PROFILE-runs)",
    )
    flags.add_settings(parser)
    return parser


def main(argv: list[str], commands: BenchCommands | None = None) -> int:
    """Run the command; return 0, or 130 after Ctrl-C. `commands` start servers and loads."""
    arguments = parser().parse(argv)
    load: list[str] = arguments.load
    if not load:
        raise ConfigError(
            "there is no load: give options of `jaxserve bench serve` after --, such as -- --dataset-name random "
            "--max-concurrency 16"
        )
    from jaxserve.bench.sweep.folder import write_whole
    from jaxserve.bench.tune.goal import read_goal
    from jaxserve.bench.tune.profile import profile_text
    from jaxserve.bench.tune.run_tune import Tuner
    from jaxserve.cli.bench import serve

    goal = read_goal(arguments.goal, arguments.limit)
    if not arguments.minutes > 0:
        raise ConfigError(f"--minutes must be above 0, got {arguments.minutes:g}")
    parsed = serve.parser().parse(load)
    base = _base(arguments)
    folder = arguments.runs or arguments.output.with_name(f"{arguments.output.stem}-runs")
    folder.mkdir(parents=True, exist_ok=True)
    warmups = [] if parsed.num_warmups else ["--num-warmups", str(_WARMUPS)]
    tuner = Tuner(
        base, [*load, *warmups], goal,
        minutes=arguments.minutes, folder=folder, seed=parsed.seed, notify=_notify, commands=commands,
    )  # fmt: skip
    try:
        tuned = tuner.tune()
    except KeyboardInterrupt:
        _notify("Interrupted: no profile was written.")
        return INTERRUPTED
    text = profile_text(base, tuned, goal, load, datetime.date.today())
    write_whole(arguments.output, text)
    print(text, end="")
    _notify(f"Written to {arguments.output}: jaxserve serve --config {arguments.output}")
    return 0


def _base(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of flags and profile, without the servers' addresses, which the benchmark sets."""
    values = {
        value.setting.name: value.value
        for value in flags.config_from_arguments(arguments).values
        if value.source != "default"
    }
    if values.get("api_key") is not None:
        raise ConfigError("--api-key: the measured servers use none; leave it out")
    return {name: value for name, value in values.items() if name not in ("host", "port", "api_key")}


def _notify(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
