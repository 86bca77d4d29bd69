"""`jaxserve serve`: the HTTP server, with the engine in a process of its own."""

from __future__ import annotations

import logging

from jaxserve import host
from jaxserve.cli.common import flags
from jaxserve.cli.common.parser import Parser
from jaxserve.observability import log

logger = logging.getLogger(__name__)


def parser() -> Parser:
    """Return the parser of `jaxserve serve`."""
    parser = Parser(prog="jaxserve serve", description=__doc__)
    flags.add_model(parser)
    flags.add_settings(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return the server's exit code."""
    loaded = flags.config_from_arguments(parser().parse(argv))
    host.check_can_serve()
    log.setup(loaded.engine.log_level, config_file=loaded.engine.log_config_file)
    for note in loaded.notes:
        logger.warning(note)

    if loaded.engine.node_rank > 0:
        from jaxserve.server.follower import run_follower

        return run_follower(loaded.engine)

    from jaxserve.server.serve import serve

    return serve(loaded.engine, loaded.server)
