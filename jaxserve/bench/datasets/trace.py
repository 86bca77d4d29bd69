"""Replays a trace in Mooncake's form: JSON lines of `timestamp`, `input_length`, `output_length` and `hash_ids`.

Requests that share hash ids at their beginning share that many tokens, so a prefix cache is hit as in the trace.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.datasets.files import json_lines
from jaxserve.bench.datasets.prompts import Conversation, alone
from jaxserve.bench.datasets.vocabulary import Vocabulary
from jaxserve.errors import ConfigError

TOKENS_A_HASH = 512
SECONDS_A_TICK = 0.001


def timed_trace(
    path: Path,
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    count: int | None,
    *,
    as_text: bool,
    tokens_a_hash: int = TOKENS_A_HASH,
    seconds_a_tick: float = SECONDS_A_TICK,
) -> list[Conversation]:
    """The first `count` requests (None: all) at their times, the first one's as zero; ids, or text for a chat.

    What a prompt has beyond its hash ids is its own. Raises `ConfigError` naming the line.
    """
    draw = vocabulary.words if as_text else vocabulary.ids
    blocks: dict[int, list[int]] = {}
    seed = int(rng.integers(2**32))
    made: list[Conversation] = []
    for number, line in enumerate(json_lines(path), start=1):
        if count is not None and len(made) == count:
            break
        where = f"{path}, request {number}"
        length, output = (_whole(line, key, where) for key in ("input_length", "output_length"))
        ids: list[int] = []
        for hash_id in line.get("hash_ids", []):
            if hash_id not in blocks:
                own = np.random.default_rng([seed, abs(int(hash_id))])
                blocks[hash_id] = (
                    vocabulary.words(own, tokens_a_hash) if as_text else vocabulary.ids(own, tokens_a_hash)
                )
            ids += blocks[hash_id]
        ids = ids[:length] + draw(rng, max(length - len(ids), 0))
        at = _number(line, "timestamp", where) * seconds_a_tick
        if as_text:
            text, tokens = vocabulary.text(rng, ids)
            made.append(alone(text, tokens + vocabulary.added, output, at))
        else:
            made.append(alone(ids, length, output, at))
    return _from_zero(sorted(made, key=_time))


def _from_zero(made: list[Conversation]) -> list[Conversation]:
    first = _time(made[0]) if made else 0.0
    return [Conversation(conversation.prompts, at=_time(conversation) - first) for conversation in made]


def _time(conversation: Conversation) -> float:
    assert conversation.at is not None
    return conversation.at


def _number(line: dict[str, Any], key: str, where: str) -> float:
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where}: {key!r} must be a number, got {value!r}")
    return float(value)


def _whole(line: dict[str, Any], key: str, where: str) -> int:
    value = _number(line, key, where)
    if value < 1 or value != int(value):
        raise ConfigError(f"{where}: {key!r} must be a whole number above 0, got {value:g}")
    return int(value)
