"""Sampling flags of `generate` and `chat`: the fields of `SamplingParams` that make sense for one streamed answer."""

from __future__ import annotations

import argparse
from typing import Any

from jaxserve.api_types import SamplingParams
from jaxserve.cli.common.parser import Parser

NUMBERS: dict[str, tuple[type[int] | type[float], str]] = {
    "max_tokens": (int, "most tokens of the answer"),
    "min_tokens": (int, "fewest tokens before it may end"),
    "temperature": (float, "0 always takes the likeliest token"),
    "top_p": (float, "draw from the likeliest tokens whose probabilities sum up to this"),
    "top_k": (int, "draw from this many of the likeliest tokens; 0 means all"),
    "min_p": (float, "leave out tokens less likely than this share of the likeliest"),
    "repetition_penalty": (float, "above 1 makes tokens of the prompt and the answer less likely"),
    "frequency_penalty": (float, "lowers tokens by how often they stand in the answer"),
    "presence_penalty": (float, "lowers tokens that stand in the answer"),
    "seed": (int, "makes the drawing repeatable"),
}
"""Fields with one number, their type and help."""


def add_sampling(parser: Parser, **defaults: Any) -> None:
    """A flag for each field; `defaults` differ from those of `SamplingParams`."""
    group = parser.add_argument_group("sampling")
    for name, (kind, text) in NUMBERS.items():
        default = defaults.get(name)
        shown = "" if default is None else f" (default {default})"
        group.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=default, metavar="X" if kind is float else "N",
            help=text + shown,
        )  # fmt: skip
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model has ended its answer")


def sampling_params(arguments: argparse.Namespace, **fallbacks: Any) -> SamplingParams:
    """What the flags ask for; `fallbacks` stand in for flags that weren't given. Raises `InvalidRequestError`."""
    given = {name: getattr(arguments, name) for name in NUMBERS if getattr(arguments, name) is not None}
    return SamplingParams(**{**fallbacks, **given}, stop=tuple(arguments.stop or ()), ignore_eos=arguments.ignore_eos)
