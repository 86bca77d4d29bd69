"""`jaxserve bench accuracy`: compares the log probabilities that two servers give the tokens of a text.

    jaxserve bench accuracy --text book.txt --model MODEL --other "--quantization gguf"
    jaxserve bench accuracy --text book.txt --base "--quantization none" --other "--kv-cache-dtype fp8_e4m3"
    jaxserve bench accuracy --text book.txt --base http://127.0.0.1:8000 --other http://127.0.0.1:8001

A side is the URL of a running server with OpenAI's routes, or flags of `jaxserve serve` for a server that the command
starts; the two are started one after the other. Settings outside --base and --other hold for both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.cli.common import flags
from jaxserve.cli.common.parser import Parser
from jaxserve.cli.common.table import format_table
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.bench.accuracy.figures import AccuracyComparison, Figure
    from jaxserve.bench.accuracy.scores import TokenNumbers, WindowScores
    from jaxserve.bench.accuracy.windows import TextWindows
    from jaxserve.bench.load.target_server import TargetServer
    from jaxserve.cli.bench.accuracy_sides import Side
    from jaxserve.text.tokenizers.tokenizer import Tokenizer


def parser() -> Parser:
    """Return the parser of `jaxserve bench accuracy`."""
    parser = Parser(prog="jaxserve bench accuracy", description=__doc__)
    flags.add_model(parser)
    add = parser.add_argument_group("comparison").add_argument
    add("--text", type=Path, required=True, metavar="FILE", help="the text, in UTF-8")
    add(
        "--base",
        default="",
        metavar="SIDE",
        help="URL, or flags in quotes (a single flag as --base=--FLAG); default: a server with the common settings",
    )
    add("--other", required=True, metavar="SIDE", help="what is compared with it, in the same form")
    add(
        "--window",
        type=int,
        default=512,
        metavar="N",
        help="tokens that are scored together, as one prompt (default 512)",
    )
    add("--max-windows", type=int, default=64, metavar="N", help="use at most the first N windows (default 64)")
    add(
        "--top-logprobs",
        type=int,
        default=20,
        metavar="N",
        help="request the N likeliest tokens of each position (default 20, the most that jaxserve and vLLM give)",
    )
    add("--tokenizer", metavar="NAME", help="built-in name, folder, .gguf file or hub id; default: the model's")
    add("--max-concurrency", type=int, default=4, metavar="N", help="maximum number of open requests (default 4)")
    add("--request-timeout", type=float, default=600.0, metavar="X", help="maximum seconds of a request (default 600)")
    add("--start-timeout", type=float, default=1800.0, metavar="X", help="maximum seconds of a start (default 1800)")
    add("--output-json", type=Path, metavar="FILE", help="write the figures to this file")
    flags.add_settings(parser, hidden=("tokenizer",))
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return the exit code."""
    arguments = parser().parse(argv)
    for name in ("top_logprobs", "max_concurrency", "request_timeout", "start_timeout"):
        value = getattr(arguments, name)
        if not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
    from jaxserve.bench.accuracy.figures import compare
    from jaxserve.bench.accuracy.scores import TokenNumbers
    from jaxserve.bench.accuracy.windows import read_windows
    from jaxserve.bench.load.target_server import load_named_tokenizer
    from jaxserve.cli.bench.accuracy_sides import read_sides
    from jaxserve.cli.bench.report import write_json

    sides = read_sides(arguments)
    tokenizer_name = arguments.tokenizer or _tokenizer_of(sides, _headers(arguments))
    tokenizer = load_named_tokenizer(tokenizer_name)
    text = read_windows(arguments.text, tokenizer, size=arguments.window, max_windows=arguments.max_windows)
    numbers, scores = TokenNumbers(tokenizer), []
    with tempfile.TemporaryDirectory(prefix="jaxserve-accuracy-") as folder:
        for side in sides:
            with side.running(Path(folder), start_timeout=arguments.start_timeout) as server:
                scores.append(asyncio.run(_score(arguments, side, server, text.windows, tokenizer, numbers)))
    comparison = compare(*scores)
    print(_report(arguments, sides, text, tokenizer, comparison))
    if arguments.output_json is not None:
        about = {
            "text": str(arguments.text),
            "tokenizer": tokenizer_name,
            "window": arguments.window,
            "num_windows": len(text.windows),
            "top_logprobs": arguments.top_logprobs,
            **{side.name: side.as_json() for side in sides},
        }
        write_json(arguments.output_json, about | dataclasses.asdict(comparison))
    return 0


def _tokenizer_of(sides: Sequence[Side], headers: Mapping[str, str]) -> str:
    """Return where to look for the tokenizer: at the model of a side that is started, else at the base's."""
    for side in sides:
        if side.server is None:
            return side.model
    base = sides[0].server
    assert base is not None
    return asyncio.run(_served_tokenizer(base, headers))


async def _served_tokenizer(server: TargetServer, headers: Mapping[str, str]) -> str:
    from jaxserve.bench.load.target_server import first_served_model, tokenizer_name

    with contextlib.closing(server.pool()) as pool:
        model = await first_served_model(server, pool, headers)
    return tokenizer_name(model.id, model.root)


async def _score(
    arguments: argparse.Namespace,
    side: Side,
    server: TargetServer,
    windows: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    numbers: TokenNumbers,
) -> list[WindowScores]:
    """Return the scores of all windows on one server, with a progress bar."""
    from tqdm import tqdm

    from jaxserve.bench.accuracy.scoring import Scorer
    from jaxserve.bench.load.target_server import first_served_model

    headers = _headers(arguments) if side.server is not None else {}
    with contextlib.closing(server.pool()) as pool:
        model = await first_served_model(server, pool, headers)
        scorer = Scorer(
            server, pool, model.id, headers, num_top=arguments.top_logprobs,
            max_concurrency=arguments.max_concurrency, seconds=arguments.request_timeout,
        )  # fmt: skip
        await scorer.check(windows[0], tokenizer)
        # None: no bar where standard error is not a terminal.
        with tqdm(total=len(windows), unit="window", desc=side.name, disable=None) as bar:
            return await scorer.score(windows, numbers, bar.update)


def _headers(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the headers of requests to servers that run already."""
    key = flags.config_from_arguments(arguments).server.api_key or os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _report(
    arguments: argparse.Namespace,
    sides: Sequence[Side],
    text: TextWindows,
    tokenizer: Tokenizer,
    comparison: AccuracyComparison,
) -> str:
    """Return the result as text."""
    from jaxserve.bench.accuracy.figures import CONFIDENCE, MIN_WINDOWS

    count = len(text.windows)
    largest = comparison.largest_difference
    token = tokenizer.token_text(text.windows[largest.window][largest.position])
    rows = [
        ("perplexity of base", comparison.base_perplexity, ".4f"),
        ("perplexity of other", comparison.other_perplexity, ".4f"),
        ("perplexity, other / base", comparison.perplexity_ratio, ".5f"),
        ("top-1 agreement", comparison.top1_agreement, ".2%"),
        ("KL(base || other), nats per token, at least", comparison.kl_divergence, ".6f"),
        ("base's probability of the tokens in both lists", comparison.compared_probability, ".2%"),
    ]
    notes = [
        f"Largest difference of a log probability: {largest.base:.3f} in base, {largest.other:.3f} in other, of token "
        f"{largest.position} of window {largest.window + 1}, {token!r}.",
        f"KL is a lower bound: it compares the tokens that are among the {arguments.top_logprobs} likeliest of both "
        "sides, and all others as one outcome.",
    ]
    if count < MIN_WINDOWS:
        notes.append(f"{count} windows are too few for intervals: {MIN_WINDOWS} are needed.")
    return "\n".join(
        [
            *(f"{side.name + ':':<6} {side.describe()}" for side in sides),
            f"text:  {arguments.text}, {text.num_text_tokens} tokens; {comparison.num_scored_tokens} of them scored "
            f"in {count} windows of {arguments.window}",
            "",
            format_table(
                ["", "value", f"{CONFIDENCE:.0%} within"],
                [(name, *_cells(figure, form)) for name, figure, form in rows],
            ),
            "",
            *notes,
        ]
    )


def _cells(figure: Figure, form: str) -> tuple[str, str]:
    """Return a figure and its bounds as text."""
    if figure.low is None or figure.high is None:
        return f"{figure.value:{form}}", "-"
    return f"{figure.value:{form}}", f"{figure.low:{form}} to {figure.high:{form}}"
