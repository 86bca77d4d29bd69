"""The format of jaxserve's log lines, the same in every process, and the two lines that show the state of the batch.

Owns only the handler of the `jaxserve` logger: other libraries keep their own loggers and levels.
"""

from __future__ import annotations

import logging
import sys

_FORMAT = "[%(asctime)s{}] %(levelname)s %(message)s"
_TIME = "%Y-%m-%d %H:%M:%S"


def setup(level: str, process: str = "") -> None:
    """Write the lines of `jaxserve` loggers from `level` (debug, info, warning, error) up to stderr.

    May be called again. Each line names `process` if it is given, for kinds of processes that run several times.
    """
    logger = logging.getLogger("jaxserve")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT.format(f" {process}" if process else ""), _TIME))
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    # Else a handler of the root logger, set by another library, would write every line a second time
    logger.propagate = False


def prefill_line(
    *, new_seq: int, new_token: int, cached_token: int, token_usage: float, running: int, queued: int, hit_rate: float
) -> str:
    """Return the log line of a step that computes prompts.

    `hit_rate` is the cache hit rate of all prompts since the start, 0 to 1.
    """
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
    """Return the log line of the decode steps since the previous such line.

    `throughput` is in tokens per second. `bucket` is the size of the program that ran last and `fine` whether it is one
    of the finely spaced ones; `padding` is the share of empty rows since the previous line.
    """
    return (
        f"Decode batch. #running-req: {running}, #token: {tokens}, token usage: {token_usage:.2f}, "
        f"gen throughput (token/s): {throughput:.2f}, #queue-req: {queued}, "
        f"cuda graph: {fine}, bucket: {bucket}, padding: {padding:.2%}"
    )
