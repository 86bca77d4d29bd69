"""How jaxserve's log lines look: one format for every process, and the two lines that tell the state of the batch.

It owns the handler of the `jaxserve` logger and nothing else: other libraries keep their own loggers and levels.
"""

from __future__ import annotations

import logging
import sys

_FORMAT = "[%(asctime)s{}] %(levelname)s %(message)s"
_TIME = "%Y-%m-%d %H:%M:%S"


def setup(level: str, process: str = "") -> None:
    """Write lines of `jaxserve` loggers from `level` (debug, info, warning, error) up to stderr; may be repeated.

    Each says which `process` it is from, where there are several of a kind.
    """
    logger = logging.getLogger("jaxserve")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT.format(f" {process}" if process else ""), _TIME))
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    # A root handler of somebody else would write every line a second time.
    logger.propagate = False


def prefill_line(
    *, new_seq: int, new_token: int, cached_token: int, token_usage: float, running: int, queued: int, hit_rate: float
) -> str:
    """The line of a step that computes prompts; `hit_rate` is that of all prompts since the start, 0 to 1."""
    return (
        f"Prefill batch. #new-seq: {new_seq}, #new-token: {new_token}, #cached-token: {cached_token}, "
        f"token usage: {token_usage:.2f}, #running-req: {running}, #queue-req: {queued}, cache hit rate: {hit_rate:.2%}"
    )


def decode_line(
    *,
    running: int,
    tokens: int,
    token_usage: float,
    throughput: float,
    queued: int,
    fine: bool,
    bucket: int,
    padding: float,
) -> str:
    """The line that sums up the decode steps since the one before; `throughput` is in tokens a second.

    `bucket` is the size of the program that ran last, `fine` whether it is one of the finely spaced ones, `padding` the
    share of empty rows since the last line.
    """
    return (
        f"Decode batch. #running-req: {running}, #token: {tokens}, token usage: {token_usage:.2f}, "
        f"gen throughput (token/s): {throughput:.2f}, #queue-req: {queued}, "
        f"cuda graph: {fine}, bucket: {bucket}, padding: {padding:.2%}"
    )
