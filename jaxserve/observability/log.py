"""The format of jaxserve's log lines, the same in every process, and the two lines that show the state of the batch.

Owns only the handler of the `jaxserve` logger: other libraries keep their own loggers and levels, unless a file of the
user's says otherwise.
"""

from __future__ import annotations

import json
import logging
import logging.config
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxserve.api_types import StageTimes
from jaxserve.errors import ConfigError
from jaxserve.observability.acceptance import Acceptance
from jaxserve.observability.stage_times import busy_text

_FORMAT = "[%(asctime)s{}] %(levelname)s %(message)s"
_TIME = "%Y-%m-%d %H:%M:%S"


def setup(level: str, process: str = "", config_file: str | None = None) -> None:
    """Write the lines of `jaxserve` loggers from `level` (debug, info, warning, error) up to stderr.

    May be called again. Each line names `process` if it is given, for kinds of processes that run several times.
    With `config_file`, that file says instead where lines go; it may set other levels. Raises `ConfigError` if it can't
    be used.
    """
    logger = logging.getLogger("jaxserve")
    logger.setLevel(level.upper())
    if config_file is not None:
        logger.handlers.clear()
        logger.propagate = True
        _apply(config_file)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT.format(f" {process}" if process else ""), _TIME))
    logger.handlers[:] = [handler]
    # Else a handler of the root logger, set by another library, would write every line a second time
    logger.propagate = False


def _apply(config_file: str) -> None:
    try:
        config = json.loads(Path(config_file).read_text(encoding="utf-8"))
        # By default Python silences all loggers that exist already and aren't named, as most of ours
        logging.config.dictConfig({"disable_existing_loggers": False, **config})
    except (OSError, ValueError, TypeError, AttributeError, ImportError, RecursionError) as error:
        cause = f": {error.__cause__}" if error.__cause__ is not None else ""
        raise ConfigError(
            f"--log-config-file {config_file} can't be used: {error}{cause}; it must be JSON for Python's "
            "logging.config.dictConfig"
        ) from error


def prefill_line(
    *,
    new_seq: int,
    new_token: int,
    cached_token: int,
    usage: Sequence[float],
    running: int,
    queued: int,
    hit_rate: float,
    states: tuple[int, float] | None = None,
) -> str:
    """Return the log line of a step that computes prompts.

    `usage` is the share of the KV cache in use, and if it has groups with a window, then the share of whole sequences
    and that of windows. `hit_rate` is the cache hit rate of all prompts since the start, 0 to 1. `states` are the
    number and the share of the rows of states that running requests have, None in a model without states.
    """
    return (
        f"Prefill batch. #new-seq: {new_seq}, #new-token: {new_token}, #cached-token: {cached_token}, "
        f"{_usage_text(usage, states)}, #running-req: {running}, #queue-req: {queued}, cache hit rate: {hit_rate:.2%}"
    )


def decode_line(
    *,
    running: int,
    tokens: int,
    usage: Sequence[float],
    throughput: float,
    queued: int,
    fine: bool,
    bucket: int,
    padding: float,
    acceptance: Acceptance | None = None,
    stages: Sequence[StageTimes] = (),
    states: tuple[int, float] | None = None,
) -> str:
    """Return the log line of the decode steps since the previous such line.

    `usage` and `states` are as in `prefill_line`. `throughput` is in tokens per second. `bucket` is the size of the
    program that ran last and `fine` whether it is one of the finely spaced ones; `padding` is the share of empty rows
    since the previous line. `acceptance` counts the drafts since then, or is None without speculative decoding.
    `stages` are the times of the pipeline stages since then, () if there is only one.
    """
    drafts = "" if acceptance is None else f"accept len: {acceptance.length:.2f}, accept rate: {acceptance.rate:.2f}, "
    busy = f", stages busy: {busy_text(stages)}" if stages else ""
    return (
        f"Decode batch. #running-req: {running}, #token: {tokens}, {_usage_text(usage, states)}, "
        f"{drafts}gen throughput (token/s): {throughput:.2f}, #queue-req: {queued}, "
        f"cuda graph: {fine}, bucket: {bucket}, padding: {padding:.2%}{busy}"
    )


def _usage_text(usage: Sequence[float], states: tuple[int, float] | None) -> str:
    names = ("token usage", "full token usage", "swa token usage")
    text = ", ".join(f"{name}: {share:.2f}" for name, share in zip(names, usage))
    return text if states is None else f"{text}, mamba num: {states[0]}, mamba usage: {states[1]:.2f}"
