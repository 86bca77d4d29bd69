"""`jaxserve bench`: measures servers and engines. Each command is a module of this folder."""

from __future__ import annotations

from jaxserve.cli.common.dispatch import command_parser, dispatch
from jaxserve.cli.common.parser import Parser

SUBCOMMANDS: dict[str, str] = {
    "serve": "send load to any OpenAI-compatible server and measure latency and throughput",
    "throughput": "highest throughput of the engine in this process, without HTTP",
    "latency": "latency of one batch: prefill, decode, and where a step's time goes",
    "startup": "start-up time of a server, cold and warm, by phase",
    "sweep": "measure a grid of engine flags and loads; can be interrupted and resumed",
    "tune": "find settings for a load by measured runs and write them as a profile",
    "accuracy": "compare two servers or schemes by the log probabilities they give a text",
    "compare": "compare results and say which differences are beyond noise",
}


def parser() -> Parser:
    """Return the parser of `jaxserve bench`."""
    return command_parser("jaxserve bench", "Measures the speed and accuracy of servers and engines.", SUBCOMMANDS)


def main(argv: list[str]) -> int:
    """Run the command and return the exit code."""
    return dispatch(parser(), SUBCOMMANDS, "jaxserve.cli.bench.", argv)
