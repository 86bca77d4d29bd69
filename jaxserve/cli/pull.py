"""`jaxserve pull`: downloads built-in models into the cache, so that a later start needs no network."""

from __future__ import annotations

from jaxserve import model_source
from jaxserve.cli.common.parser import Parser
from jaxserve.config.schema import DEFAULT_MODEL
from jaxserve.model_source import BUILTIN_MODELS


def parser() -> Parser:
    """Return the parser of `jaxserve pull`."""
    parser = Parser(prog="jaxserve pull", description=__doc__)
    parser.add_argument(
        "models",
        metavar="model",
        nargs="*",
        default=[DEFAULT_MODEL],
        help=f"a built-in name: {', '.join(BUILTIN_MODELS)} (default {DEFAULT_MODEL})",
    )
    parser.add_argument("--force", action="store_true", help="download it again even if it is in the cache")
    return parser


def main(argv: list[str]) -> int:
    """Run the command: print the path of each model and return the exit code."""
    arguments = parser().parse(argv)
    for model in arguments.models:
        print(model_source.pull(model, force=arguments.force), flush=True)
    return 0
