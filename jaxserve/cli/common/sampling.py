"""Sampling flags of `generate` and `chat`: the fields of `SamplingParams` that apply to one streamed answer."""

from __future__ import annotations

import argparse
from typing import Any

from jaxserve.api_types import NUMBER_OPTIONS, SHARED_OPTIONS, SamplingParams
from jaxserve.cli.common.parser import Parser

# The order of the flags
NUMBERS = {name: NUMBER_OPTIONS[name] for name in ("max_tokens", "min_tokens", *NUMBER_OPTIONS)}


def add_sampling(parser: Parser, **fallbacks: Any) -> None:
    """Add a flag for each field; `fallbacks` are the values of those for which neither flag nor model has one."""
    group = parser.add_argument_group("sampling")
    for name in NUMBERS:
        shown = "model's, else " if name in SHARED_OPTIONS else ""
        add_number(group, name, f" (default: {shown}{fallbacks[name]})" if name in fallbacks else "")
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="continue after the model's end-of-answer token")


def add_number(group: argparse._ArgumentGroup, name: str, default: str = "") -> None:
    """Add the flag of a numeric field; `default` ends its help text."""
    option = NUMBERS[name]
    metavar = "X" if option.kind is float else "N"
    flag = f"--{name.replace('_', '-')}"
    group.add_argument(flag, type=option.kind, metavar=metavar, help=option.help.text + default)


def sampling_params(arguments: argparse.Namespace, **fallbacks: Any) -> SamplingParams:
    """Return the parameters of the flags, with `fallbacks` for flags not given. Raises `InvalidRequestError`."""
    given = {name: getattr(arguments, name) for name in NUMBERS if getattr(arguments, name) is not None}
    return SamplingParams(**{**fallbacks, **given}, stop=tuple(arguments.stop or ()), ignore_eos=arguments.ignore_eos)
