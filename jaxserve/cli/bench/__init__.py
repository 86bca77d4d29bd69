"""`jaxserve bench`: measures servers and engines. Each of its commands is a module of this folder."""

from __future__ import annotations

from jaxserve.cli.common.dispatch import command_parser, dispatch
from jaxserve.cli.common.parser import Parser

SUBCOMMANDS: dict[str, str] = {
    "serve": "load an OpenAI-compatible server, ours or another's, and measure what its clients see",
    "throughput": "the most the engine does in this process, without HTTP",
    "latency": "one batch again and again: prefill, decode, and where a step's time goes",
    "startup": "how long a server takes to be ready, cold and warm, by phase",
    "sweep": "measure a grid of engine flags and loads; can be interrupted and resumed",
    "tune": "find settings for a load by measured runs, and write them as a profile",
    "compare": "say whether one result is faster than another, beyond noise",
}


def parser() -> Parser:
    """The commands of `jaxserve bench`."""
    return command_parser("jaxserve bench", "Measures what serving costs and how fast it is.", SUBCOMMANDS)


def main(argv: list[str]) -> int:
    """Run it; returns the exit code."""
    return dispatch(parser(), SUBCOMMANDS, "jaxserve.cli.bench.", argv)
