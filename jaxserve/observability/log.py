"""How jaxserve's log lines look: one format for every process, and the two lines that tell the state of the batch.

It owns the handler of the `jaxserve` logger and nothing else: other libraries keep their own loggers and levels.
"""

from __future__ import annotations

import logging
import sys

_FORMAT = "[%(asctime)s] %(levelname)s %(message)s"
_TIME = "%Y-%m-%d %H:%M:%S"


def setup(level: str) -> None:
    """Write lines of `jaxserve` loggers from `level` (debug, info, warning, error) up to stderr; may be repeated."""
    logger = logging.getLogger("jaxserve")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, _TIME))
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    # A root handler of somebody else would write every line a second time.
    logger.propagate = False


def prefill_line(
    *, new_seq: int, new_token: int, cached_token: int, token_usage: float, running: int, queued: int
) -> str:
    """The line of a step that computes prompts."""
    return (
        f"Prefill batch. #new-seq: {new_seq}, #new-token: {new_token}, #cached-token: {cached_token}, "
        f"token usage: {token_usage:.2f}, #running-req: {running}, #queue-req: {queued}"
    )


def decode_line(*, running: int, tokens: int, token_usage: float, throughput: float, queued: int) -> str:
    """The line that sums up the decode steps since the one before; `throughput` is in tokens a second."""
    return (
        f"Decode batch. #running-req: {running}, #token: {tokens}, token usage: {token_usage:.2f}, "
        f"gen throughput (token/s): {throughput:.2f}, #queue-req: {queued}"
    )
