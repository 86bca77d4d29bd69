"""`jaxserve config explain`: shows the value of every setting under the given flags and YAML, and its source."""

from __future__ import annotations

import json

from jaxserve.cli.common import flags
from jaxserve.cli.common.parser import Parser
from jaxserve.config.explain import as_rows, as_text
from jaxserve.errors import ConfigError


def parser() -> Parser:
    """Return the parser of `jaxserve config explain`: the flags of `jaxserve serve`, and `--json`."""
    parser = Parser(prog="jaxserve config explain", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    flags.add_model(parser)
    flags.add_settings(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return the exit code."""
    if argv[:1] in (["-h"], ["--help"]):
        argv = ["explain", *argv]
    if argv[:1] != ["explain"]:
        raise ConfigError("usage: jaxserve config explain [flags of jaxserve serve] [--json]")
    arguments = parser().parse(argv[1:])
    loaded = flags.config_from_arguments(arguments)
    if arguments.json:
        print(json.dumps({"settings": as_rows(loaded), "notes": loaded.notes}, indent=2))
    else:
        print("\n".join(as_text(loaded)))
    return 0
