"""Flags of `jaxserve bench serve`, under the names of vLLM's tool; those of datasets are in `dataset_flags`."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from jaxserve.api_types import SHARED_OPTIONS
from jaxserve.bench.load.backends import BACKENDS
from jaxserve.bench.results.metrics import METRICS
from jaxserve.cli.bench.dataset_flags import add_datasets
from jaxserve.cli.common.parser import Parser
from jaxserve.cli.common.sampling import add_number
from jaxserve.errors import ConfigError

_GOALS = ("ttft", "tpot", "e2el")
_SIX_HOURS = 6 * 3600.0
_EPILOG = """\
Every answer is streamed. Tokens are counted by the server (usage). TTFT, TPOT and E2EL start when the request is sent,
after any wait for --max-concurrency. Failed and cut requests are counted but not averaged. Ctrl-C ends the run and
prints the results so far. Exit code 1: no request succeeded."""


def serve_parser(description: str) -> Parser:
    """Return the parser of `jaxserve bench serve`."""
    parser = Parser(prog="jaxserve bench serve", description=description, epilog=_EPILOG)
    _add_server(parser)
    add_datasets(parser)
    _add_load(parser)
    _add_sampling(parser)
    _add_result(parser)
    return parser


def _add_server(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    add = group.add_argument
    add(
        "--backend",
        choices=tuple(BACKENDS),
        default="openai",
        metavar="NAME",
        help=f"route and format of requests: {', '.join(BACKENDS)} (default openai, the completions route)",
    )
    add("--base-url", metavar="URL", help="where the server listens, instead of --host and --port")
    add("--host", default="127.0.0.1", metavar="TEXT", help="address of the server (default 127.0.0.1)")
    add("--port", type=int, default=8000, metavar="N", help="port of the server (default 8000)")
    add("--endpoint", metavar="PATH", help="default: the backend's, /v1/completions or /v1/chat/completions")
    add("--model", metavar="NAME", help="name or path of the model; default: the first of /v1/models")
    add("--served-model-name", metavar="NAME", help="the model's name in requests, if it is not --model")
    add("--tokenizer", metavar="NAME", help="built-in name, folder, .gguf file or hub id; default: the model's")
    add("--header", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="header of every request")
    add("--api-key", metavar="TEXT", help="bearer key; default: the environment variable OPENAI_API_KEY")
    add(
        "--extra-body",
        type=_object,
        default={},
        metavar="JSON",
        help="fields that override those of every request; null removes a field",
    )
    add("--insecure", action="store_true", help="accept any TLS certificate")
    add("--no-keep-alive", action="store_true", help="open a new connection for every request")
    add(
        "--request-timeout",
        type=float,
        default=_SIX_HOURS,
        metavar="X",
        help="maximum seconds of a request in total (default 6 hours)",
    )
    add(
        "--stall-timeout",
        type=float,
        default=300.0,
        metavar="X",
        help="maximum seconds of silence within a stream before it counts as failed (default 300)",
    )
    add(
        "--ready-check-timeout-sec",
        type=float,
        default=0.0,
        metavar="X",
        help="wait up to X seconds until the server answers one request (default 0: it must listen already)",
    )
    add("--request-id-prefix", default="bench-", metavar="TEXT", help="prefix of X-Request-Id (default bench-)")
    add("--profile", action="store_true", help="POST /start_profile before the run and /stop_profile after it")


def _add_load(parser: Parser) -> None:
    group = parser.add_argument_group("load")
    add = group.add_argument
    add(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="X",
        help="requests (or conversations) per second; inf sends all at once (default)",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="shape of the gamma distribution of the gaps: 1 is a Poisson process, smaller is burstier (default 1)",
    )
    add("--max-concurrency", type=int, metavar="N", help="maximum number of open requests; default: no limit")
    add("--ramp-up-strategy", choices=("linear", "exponential"), help="how the rate changes over the run")
    add("--ramp-up-start-rps", type=float, metavar="X", help="rate at the start")
    add("--ramp-up-end-rps", type=float, metavar="X", help="rate at the end")
    add("--num-warmups", type=int, default=0, metavar="N", help="unmeasured requests before the run")
    add(
        "--self-timed",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="send requests at the trace's own times (default for timed-trace)",
    )


def _add_sampling(parser: Parser) -> None:
    group = parser.add_argument_group("sampling", "Parameters not given are left to the server.")
    for name in SHARED_OPTIONS:
        add_number(group, name)
    group.add_argument("--logprobs", type=int, metavar="N", help="request log probabilities of the N likeliest tokens")
    group.add_argument(
        "--ignore-eos", action="store_true", help="generate the full requested length (always on for traces)"
    )
    group.add_argument("--per-request-seed", action="store_true", help="request i has the seed --seed + i")


def _add_result(parser: Parser) -> None:
    group = parser.add_argument_group("result")
    add = group.add_argument
    add(
        "--goodput",
        nargs="+",
        type=_goal,
        default=[],
        metavar="METRIC:MS",
        help=f"also report requests per second within these limits on {', '.join(_GOALS)}",
    )
    add(
        "--percentile-metrics",
        type=_metrics,
        default=METRICS,
        metavar="NAMES",
        help=f"latencies to report (default {','.join(METRICS)})",
    )
    add(
        "--metric-percentiles",
        type=_percentiles,
        default=(50.0, 90.0, 95.0, 99.0),
        metavar="NUMBERS",
        help="percentiles to report (default 50,90,95,99)",
    )
    add("--output-json", "--output-file", type=Path, metavar="FILE", help="write the full result, with raw records")
    add("--save-result", action="store_true", help="write the figures to a JSON file named after load, model and time")
    add("--save-detailed", action="store_true", help="like --save-result, with raw records")
    add("--save-generated-texts", action="store_true", help="include the texts of answers in the files")
    add("--result-dir", type=Path, metavar="DIR", help="folder of --save-result (default: the working directory)")
    add("--result-filename", metavar="NAME", help="file name of --save-result")
    add("--label", metavar="TEXT", help="first part of that name (default: the backend)")
    add("--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="additional fields of the result files")
    add("--disable-tqdm", action="store_true", help="hide the progress bar")


def pairs(flag: str, items: list[str]) -> dict[str, str]:
    """Parse KEY=VALUE arguments. Raises `ConfigError`."""
    for item in items:
        if "=" not in item:
            raise ConfigError(f"{flag} takes KEY=VALUE, got {item!r}")
    return {key.strip(): value.strip() for key, _, value in (item.partition("=") for item in items)}


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} should be a JSON object")
    return value


def _goal(text: str) -> tuple[str, float]:
    metric, _, limit = text.partition(":")
    milliseconds = _number(limit)
    if metric not in _GOALS or milliseconds is None or milliseconds < 0:
        raise argparse.ArgumentTypeError(f"{text!r} should be one of {', '.join(f'{goal}:MS' for goal in _GOALS)}")
    return metric, milliseconds


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in METRICS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: the metrics are {','.join(METRICS)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    values = [_number(number) for number in text.split(",")]
    known = tuple(value for value in values if value is not None and 0 <= value <= 100)
    if len(known) < len(values):
        raise argparse.ArgumentTypeError(f"{text!r} should be numbers from 0 to 100, with commas between them")
    return known


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
