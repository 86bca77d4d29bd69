"""Entry point: finds the subcommand, imports its module only then, turns our errors into one line and an exit code.

A module of a subcommand has `main(argv) -> exit code`. Nothing here imports more than argparse, so that
`jaxserve --help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

import jaxserve
from jaxserve.cli.parser import HelpFormatter, Parser
from jaxserve.config.nearest import nearest
from jaxserve.errors import ConfigError, InvalidRequestError, JaxserveError, ModelNotFoundError

COMMANDS = {
    "serve": "serve a model over HTTP, with OpenAI's routes",
    "generate": "continue one prompt, streamed to the terminal",
    "chat": "talk with a model in the terminal",
    "plan": "say what fits a device that isn't here, and how fast it can be at best",
    "compile": "compile every program for a device that isn't here, or into a bundle for this one",
    "pull": "fetch a model into the cache ahead of time",
    "doctor": "watch a running server and say which settings to turn",
    "config": "explain every setting: its value and where it comes from",
}

_WHAT = "A serving engine for large language models on JAX: NVIDIA GPUs, TPUs, and a plain CPU."

USER_ERROR = 2
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run `jaxserve` with these arguments (default: the process's) and return its exit code."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except (ConfigError, ModelNotFoundError, InvalidRequestError) as error:
        return _fail(error, USER_ERROR)
    except JaxserveError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(argv: list[str]) -> int:
    parser = Parser(prog="jaxserve", description=_WHAT, formatter_class=HelpFormatter, epilog=_commands())
    parser.add_argument("--version", action="version", version=f"jaxserve {jaxserve.__version__}")
    parser.add_argument("command", nargs="?", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own; see `jaxserve COMMAND --help`")
    arguments = parser.parse(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return USER_ERROR
    if arguments.command not in COMMANDS:
        hint = nearest(arguments.command, COMMANDS) or f"; the commands are {', '.join(COMMANDS)}"
        raise ConfigError(f"{arguments.command!r} is not a command{hint}")
    module = importlib.import_module(f"jaxserve.cli.{arguments.command}")
    code: int = module.main(arguments.arguments)
    return code


def _commands() -> str:
    return "commands:\n" + "\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())


def _fail(error: JaxserveError, code: int) -> int:
    print(f"jaxserve: error: {error}", file=sys.stderr)
    return code
