"""Conversations of several turns: each prompt is sent with the answers the server gave before it."""

from __future__ import annotations

import numpy as np

from jaxserve.bench.datasets.prompts import Conversation, Prompt
from jaxserve.bench.datasets.vocabulary import Vocabulary


def random_turns(
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    count: int,
    *,
    turns: int,
    input_len: int,
    output_len: int,
    system_len: int,
    pause: float,
) -> list[Conversation]:
    """Made-up conversations with `count` requests in all, each of `turns` prompts (the last may have fewer), behind a
    system prompt that all share."""
    system = vocabulary.text(rng, vocabulary.words(rng, system_len))[0] if system_len else None
    made = []
    while count > 0:
        texts = [vocabulary.text(rng, vocabulary.words(rng, input_len))[0] for _ in range(min(turns, count))]
        made.append(as_conversation(texts, output_len, system=system, pause=pause))
        count -= len(texts)
    return made


def as_conversation(
    texts: list[str], output_len: int, *, system: str | None = None, pause: float = 0.0
) -> Conversation:
    """Turns of these texts; how long each prompt is, with all that was said before, only the server will know."""
    return Conversation(tuple(Prompt(text, None, output_len) for text in texts), system=system, pause=pause)
