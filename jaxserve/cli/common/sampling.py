"""Sampling flags of `generate` and `chat`: the fields of `SamplingParams` that apply to one streamed answer."""

from __future__ import annotations

import argparse
from typing import Any

from jaxserve.api_types import NUMBER_OPTIONS, SamplingParams
from jaxserve.cli.common.parser import Parser

# The order of the flags
NUMBERS = {name: NUMBER_OPTIONS[name] for name in ("max_tokens", "min_tokens", *NUMBER_OPTIONS)}


def add_sampling(parser: Parser, **defaults: Any) -> None:
    """Add a flag for each field; `defaults` override those of `SamplingParams`."""
    group = parser.add_argument_group("sampling")
    for name in NUMBERS:
        add_number(group, name, defaults.get(name))
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="continue after the model's end-of-answer token")


def add_number(group: argparse._ArgumentGroup, name: str, default: Any = None) -> None:
    """Add the flag of a numeric field."""
    option = NUMBERS[name]
    shown = "" if default is None else f" (default {default})"
    metavar = "X" if option.kind is float else "N"
    flag = f"--{name.replace('_', '-')}"
    group.add_argument(flag, type=option.kind, default=default, metavar=metavar, help=option.help.text + shown)


def sampling_params(arguments: argparse.Namespace, **fallbacks: Any) -> SamplingParams:
    """Return the parameters of the flags, with `fallbacks` for flags not given. Raises `InvalidRequestError`."""
    given = {name: getattr(arguments, name) for name in NUMBERS if getattr(arguments, name) is not None}
    return SamplingParams(**{**fallbacks, **given}, stop=tuple(arguments.stop or ()), ignore_eos=arguments.ignore_eos)
