"""`jaxserve bench tune`: finds settings for a load by measured runs, and writes them as a profile for `--config`.

    jaxserve bench tune --goal throughput --minutes 20 --output tuned.yaml \\
        -- --dataset-name random --num-prompts 64 --max-concurrency 16 --ignore-eos
    jaxserve bench tune --config configs/cpu.yaml --goal latency --limit ttft:200 tpot:50 -- --request-rate 4
    jaxserve serve --config tuned.yaml

Before `--` stand the goal and the settings that hold throughout, as `jaxserve serve` takes them; after it the load, as
`jaxserve bench serve` takes it. Tried are max_running_requests, chunked_prefill_size, schedule_policy,
schedule_conservativeness and cuda_graph_bs, each only where the load makes it matter.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.cli.common import flags
from jaxserve.cli.common.parser import HelpFormatter, Parser
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.bench.sweep.run_sweep import Commands

INTERRUPTED = 130
# A fresh server's first requests touch memory for the first time.
_WARMUPS = 4


class _Parser(Parser):
    """What stands after `--` is kept as `load`, unparsed."""

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        cut = argv.index("--") if "--" in argv else len(argv)
        arguments = super().parse(argv[:cut])
        arguments.load = list(argv[cut + 1 :])
        return arguments


def parser() -> Parser:
    """The flags of `jaxserve bench tune`."""
    parser = _Parser(prog="jaxserve bench tune", description=__doc__, formatter_class=HelpFormatter)
    flags.add_model(parser)
    parser.add_argument(
        "--goal",
        choices=("throughput", "latency"),
        required=True,
        help="throughput: output tokens a second; latency: requests a second that keep every --limit",
    )
    parser.add_argument(
        "--limit", nargs="+", default=[], metavar="METRIC:MS", help="limits in milliseconds on ttft, tpot, e2el"
    )
    parser.add_argument("--minutes", type=float, default=15.0, metavar="X", help="time to measure in (default 15)")
    parser.add_argument(
        "--output", type=Path, default=Path("tuned.yaml"), metavar="FILE", help="the profile (default tuned.yaml)"
    )
    parser.add_argument(
        "--runs", type=Path, metavar="FOLDER", help="where results and logs lie (default: the profile's name and -runs)"
    )
    flags.add_settings(parser)
    return parser


def main(argv: list[str], commands: Commands | None = None) -> int:
    """Run it; returns 0, or 130 after Ctrl-C. `commands` start servers and loads."""
    arguments = parser().parse(argv)
    load: list[str] = arguments.load
    if not load:
        raise ConfigError(
            "there is no load: options of `jaxserve bench serve` after --, such as -- --dataset-name random "
            "--max-concurrency 16"
        )
    from jaxserve.bench.sweep.folder import write_whole
    from jaxserve.bench.tune.goal import read_goal
    from jaxserve.bench.tune.profile import profile
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
        minutes=arguments.minutes, folder=folder, seed=parsed.seed, say=_say, commands=commands,
    )  # fmt: skip
    try:
        tuned = tuner.tune()
    except KeyboardInterrupt:
        _say("Interrupted: no profile is written.")
        return INTERRUPTED
    text = profile(base, tuned, goal, load, datetime.date.today())
    write_whole(arguments.output, text)
    print(text, end="")
    _say(f"Written to {arguments.output}: jaxserve serve --config {arguments.output}")
    return 0


def _base(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings given, by flag or profile; where the servers listen is not theirs to say."""
    values = {value.setting.name: value.value for value in flags.loaded(arguments).values if value.source != "default"}
    if values.get("api_key") is not None:
        raise ConfigError("--api-key: the servers that are measured need none; leave it out")
    return {name: value for name, value in values.items() if name not in ("host", "port", "api_key")}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
