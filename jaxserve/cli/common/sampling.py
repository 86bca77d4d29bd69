"""Sampling flags of `generate` and `chat`: the fields of `SamplingParams` that apply to one streamed answer."""

from __future__ import annotations

import argparse
from typing import Any

from jaxserve.api_types import SamplingParams
from jaxserve.cli.common.parser import Parser

NUMBERS: dict[str, tuple[type[int] | type[float], str]] = {
    "max_tokens": (int, "maximum number of tokens of the answer"),
    "min_tokens": (int, "minimum number of tokens before the answer may end"),
    "temperature": (float, "0 always selects the most likely token"),
    "top_p": (float, "sample from the most likely tokens whose probabilities sum to this"),
    "top_k": (int, "sample from this many most likely tokens; 0 means all"),
    "min_p": (float, "exclude tokens less likely than this fraction of the most likely one"),
    "repetition_penalty": (float, "above 1 makes tokens of the prompt and the answer less likely"),
    "frequency_penalty": (float, "lowers tokens in proportion to their count in the answer"),
    "presence_penalty": (float, "lowers tokens that are already in the answer"),
    "seed": (int, "makes sampling repeatable"),
}
"""The numeric fields, with their types and help texts."""


def add_sampling(parser: Parser, **defaults: Any) -> None:
    """Add a flag for each field; `defaults` override those of `SamplingParams`."""
    group = parser.add_argument_group("sampling")
    for name, (kind, text) in NUMBERS.items():
        default = defaults.get(name)
        shown = "" if default is None else f" (default {default})"
        group.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=default, metavar="X" if kind is float else "N",
            help=text + shown,
        )  # fmt: skip
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="continue after the model's end-of-answer token")


def sampling_params(arguments: argparse.Namespace, **fallbacks: Any) -> SamplingParams:
    """Return the parameters of the flags, with `fallbacks` for flags not given. Raises `InvalidRequestError`."""
    given = {name: getattr(arguments, name) for name in NUMBERS if getattr(arguments, name) is not None}
    return SamplingParams(**{**fallbacks, **given}, stop=tuple(arguments.stop or ()), ignore_eos=arguments.ignore_eos)
