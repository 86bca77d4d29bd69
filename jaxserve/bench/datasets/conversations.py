"""Conversations of several turns: each prompt is sent with the server's earlier answers."""

from __future__ import annotations

import numpy as np

from jaxserve.bench.datasets.prompts import BenchConversation, DatasetPrompt
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
) -> list[BenchConversation]:
    """Generate conversations of `turns` prompts each, `count` prompts in total (the last one may be shorter), with a
    shared system prompt."""
    system = vocabulary.text(rng, vocabulary.words(rng, system_len))[0] if system_len else None
    made = []
    while count > 0:
        texts = [vocabulary.text(rng, vocabulary.words(rng, input_len))[0] for _ in range(min(turns, count))]
        made.append(as_conversation(texts, output_len, system=system, pause=pause))
        count -= len(texts)
    return made


def as_conversation(
    texts: list[str], output_len: int, *, system: str | None = None, pause: float = 0.0
) -> BenchConversation:
    """Return a conversation of these texts. Its prompt lengths are unknown: they depend on the server's answers."""
    return BenchConversation(tuple(DatasetPrompt(text, None, output_len) for text in texts), system=system, pause=pause)
