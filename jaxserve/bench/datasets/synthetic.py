"""Generated prompts: random ones, and ones that share prefixes.

Every function draws request by request, so that a longer dataset starts with the shorter one of the same seed.
"""

from __future__ import annotations

import numpy as np

from jaxserve.bench.datasets.lengths import LengthRange
from jaxserve.bench.datasets.prompts import BenchConversation, single_prompt
from jaxserve.bench.datasets.vocabulary import Vocabulary
from jaxserve.errors import ConfigError


def random_text(
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    count: int,
    inputs: LengthRange,
    outputs: LengthRange,
    prefix_len: int = 0,
) -> list[BenchConversation]:
    """Generate texts of random words after one shared prefix. `inputs` is the length without the prefix."""
    prefix = vocabulary.words(rng, prefix_len)
    made = []
    for _ in range(count):
        length, output = inputs.draw(rng), outputs.draw(rng)
        made.append(_text(vocabulary, rng, prefix + vocabulary.words(rng, length), output))
    return made


def random_ids(
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    count: int,
    inputs: LengthRange,
    outputs: LengthRange,
    prefix_len: int = 0,
) -> list[BenchConversation]:
    """Generate the same as token ids, drawn from all ordinary tokens."""
    prefix = vocabulary.ids(rng, prefix_len)
    made = []
    for _ in range(count):
        length, output = inputs.draw(rng), outputs.draw(rng)
        ids = prefix + vocabulary.ids(rng, length)
        made.append(single_prompt(ids, len(ids), output))
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
) -> list[BenchConversation]:
    """Generate equally many requests for each prefix, shuffled. Raises `ConfigError` if a prefix would get none."""
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
) -> list[BenchConversation]:
    """Generate SGLang's dataset: groups of questions that share a system prompt, shuffled unless `ordered`."""
    made = []
    for _ in range(groups):
        system = vocabulary.words(rng, system_prompt_len)
        made += [
            _text(vocabulary, rng, system + vocabulary.words(rng, question_len), output_len)
            for _ in range(prompts_per_group)
        ]
    return made if ordered else _shuffled(made, rng)


def _text(vocabulary: Vocabulary, rng: np.random.Generator, ids: list[int], output: int) -> BenchConversation:
    text, tokens = vocabulary.text(rng, ids)
    return single_prompt(text, tokens + vocabulary.added, output)


def _shuffled(made: list[BenchConversation], rng: np.random.Generator) -> list[BenchConversation]:
    return [made[i] for i in rng.permutation(len(made))]
