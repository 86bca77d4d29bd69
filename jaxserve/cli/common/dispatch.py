"""Finds a command by its name and imports its module only then; used by `jaxserve` and `jaxserve bench`.

The module of a command has `main(argv) -> exit code`. Nothing here imports more than argparse.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence

from jaxserve.cli.common.parser import Parser
from jaxserve.config.nearest import nearest
from jaxserve.errors import ConfigError

USER_ERROR = 2
INTERRUPTED = 130


def command_parser(prog: str, description: str, commands: Mapping[str, str]) -> Parser:
    """Return a parser for the name of a command and the arguments after it; its help lists the commands."""
    listed = "commands:\n" + "\n".join(f"  {name:<10} {line}" for name, line in commands.items())
    parser = Parser(prog=prog, description=description, epilog=listed)
    parser.add_argument("command", nargs="?", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=f"its arguments; see `{prog} COMMAND --help`")
    return parser


def dispatch(parser: Parser, commands: Mapping[str, str], modules: str, argv: Sequence[str]) -> int:
    """Run the command named in `argv` and return its exit code; `modules` is the prefix of the modules' names."""
    arguments = parser.parse(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return USER_ERROR
    if arguments.command not in commands:
        hint = nearest(arguments.command, commands) or f"; the commands are {', '.join(commands)}"
        raise ConfigError(f"{arguments.command!r} is not a command{hint}")
    module = importlib.import_module(f"{modules}{arguments.command}")
    code: int = module.main(arguments.arguments)
    return code
