"""Made-up prompts: random ones, and ones that share prefixes.

Every function draws request by request, so that a longer dataset begins with the shorter one of the same seed.
"""

from __future__ import annotations

import numpy as np

from jaxserve.bench.datasets.lengths import Span
from jaxserve.bench.datasets.prompts import Conversation, alone
from jaxserve.bench.datasets.vocabulary import Vocabulary
from jaxserve.errors import ConfigError


def random_text(
    vocabulary: Vocabulary, rng: np.random.Generator, count: int, inputs: Span, outputs: Span, prefix_len: int = 0
) -> list[Conversation]:
    """Texts of random words, after one prefix that all share. `inputs` are tokens of the rest."""
    prefix = vocabulary.words(rng, prefix_len)
    made = []
    for _ in range(count):
        length, output = inputs.draw(rng), outputs.draw(rng)
        made.append(_text(vocabulary, rng, prefix + vocabulary.words(rng, length), output))
    return made


def random_ids(
    vocabulary: Vocabulary, rng: np.random.Generator, count: int, inputs: Span, outputs: Span, prefix_len: int = 0
) -> list[Conversation]:
    """The same as token ids, of any ordinary tokens."""
    prefix = vocabulary.ids(rng, prefix_len)
    made = []
    for _ in range(count):
        length, output = inputs.draw(rng), outputs.draw(rng)
        ids = prefix + vocabulary.ids(rng, length)
        made.append(alone(ids, len(ids), output))
    return made


def prefix_repetition(
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    count: int,
    *,
    num_prefixes: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
) -> list[Conversation]:
    """As many requests behind each prefix, shuffled. Raises `ConfigError` where a prefix would get none."""
    if not 1 <= num_prefixes <= count:
        raise ConfigError(f"--prefix-repetition-num-prefixes is {num_prefixes}: there must be 1 to {count} (requests)")
    prefixes = [vocabulary.words(rng, prefix_len) for _ in range(num_prefixes)]
    made = [
        _text(vocabulary, rng, prefixes[i % num_prefixes] + vocabulary.words(rng, suffix_len), output_len)
        for i in range(count)
    ]
    return _shuffled(made, rng)


def shared_prefix_groups(
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    *,
    groups: int,
    prompts_per_group: int,
    system_prompt_len: int,
    question_len: int,
    output_len: int,
    ordered: bool,
) -> list[Conversation]:
    """SGLang's: groups of questions behind one system prompt each, shuffled unless `ordered`."""
    made = []
    for _ in range(groups):
        system = vocabulary.words(rng, system_prompt_len)
        made += [
            _text(vocabulary, rng, system + vocabulary.words(rng, question_len), output_len)
            for _ in range(prompts_per_group)
        ]
    return made if ordered else _shuffled(made, rng)


def _text(vocabulary: Vocabulary, rng: np.random.Generator, ids: list[int], output: int) -> Conversation:
    text, tokens = vocabulary.text(rng, ids)
    return alone(text, tokens + vocabulary.added, output)


def _shuffled(made: list[Conversation], rng: np.random.Generator) -> list[Conversation]:
    return [made[i] for i in rng.permutation(len(made))]
