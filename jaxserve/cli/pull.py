"""`jaxserve pull`: fetches a model into the cache, so that a later start needs no network."""

from __future__ import annotations

from jaxserve import model_source
from jaxserve.cli.common.parser import HelpFormatter, Parser
from jaxserve.config.schema import DEFAULT_MODEL


def parser() -> Parser:
    """The flags of `jaxserve pull`."""
    parser = Parser(prog="jaxserve pull", description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help=f"a built-in name or a hub id (default {DEFAULT_MODEL})"
    )
    parser.add_argument("--force", action="store_true", help="fetch it again though it is there")
    return parser


def main(argv: list[str]) -> int:
    """Run it; prints the path of what was fetched and returns the exit code."""
    arguments = parser().parse(argv)
    print(model_source.pull(arguments.model, force=arguments.force))
    return 0
