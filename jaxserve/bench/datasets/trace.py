"""Replays a trace in Mooncake's format: JSON lines of `timestamp`, `input_length`, `output_length` and `hash_ids`.

Requests whose first hash ids are equal share the tokens of those ids, so the prefix cache hits as in the trace.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.datasets.files import json_lines
from jaxserve.bench.datasets.prompts import BenchConversation, Content, single_prompt
from jaxserve.bench.datasets.vocabulary import Vocabulary
from jaxserve.errors import ConfigError

TOKENS_PER_HASH = 512
SECONDS_PER_TICK = 0.001


def timed_trace(
    path: Path,
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    count: int | None,
    *,
    as_text: bool,
    tokens_per_hash: int = TOKENS_PER_HASH,
    seconds_per_tick: float = SECONDS_PER_TICK,
) -> list[BenchConversation]:
    """Return the first `count` requests (None: all) with their times relative to the first; ids, or text for a chat.

    Tokens of a prompt beyond its hash ids are unique to it. Raises `ConfigError` that names the line.
    """
    draw = vocabulary.words if as_text else vocabulary.ids
    blocks: dict[int, list[int]] = {}
    seed = int(rng.integers(2**32))
    requests: list[tuple[float, Content, int, int]] = []
    for number, line in enumerate(json_lines(path), start=1):
        if count is not None and len(requests) == count:
            break
        where = f"{path}, request {number}"
        length, output = (_whole(line, key, where) for key in ("input_length", "output_length"))
        ids: list[int] = []
        for hash_id in line.get("hash_ids", []):
            if hash_id not in blocks:
                own = np.random.default_rng([seed, abs(int(hash_id))])
                blocks[hash_id] = draw(own, tokens_per_hash)
            ids += blocks[hash_id]
        ids = ids[:length] + draw(rng, max(length - len(ids), 0))
        at = _number(line, "timestamp", where) * seconds_per_tick
        if as_text:
            text, tokens = vocabulary.text(rng, ids)
            requests.append((at, text, tokens + vocabulary.added, output))
        else:
            requests.append((at, ids, length, output))
    requests.sort(key=lambda request: request[0])
    return [single_prompt(content, tokens, output, at - requests[0][0]) for at, content, tokens, output in requests]


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
