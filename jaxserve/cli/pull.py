"""`jaxserve pull`: downloads a model into the cache, so that a later start needs no network."""

from __future__ import annotations

from jaxserve import model_source
from jaxserve.cli.common.parser import Parser
from jaxserve.config.schema import DEFAULT_MODEL


def parser() -> Parser:
    """Return the parser of `jaxserve pull`."""
    parser = Parser(prog="jaxserve pull", description=__doc__)
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help=f"a built-in name or a hub id (default {DEFAULT_MODEL})"
    )
    parser.add_argument("--force", action="store_true", help="download it again even if it is in the cache")
    return parser


def main(argv: list[str]) -> int:
    """Run the command: print the path of the model and return the exit code."""
    arguments = parser().parse(argv)
    print(model_source.pull(arguments.model, force=arguments.force))
    return 0
