from __future__ import annotations

import numpy as np
import pytest

from jaxserve.bench.datasets.vocabulary import Vocabulary
from jaxserve.errors import ConfigError
from tests.bench.word_tokenizer import word_tokenizer
from tests.text import small_tokenizers


@pytest.mark.parametrize("count", [1, 7, 500])
def test_a_text_has_the_requested_number_of_tokens(count: int) -> None:
    tokenizer = word_tokenizer()
    vocabulary, rng = Vocabulary(tokenizer), np.random.default_rng(0)
    ids = vocabulary.words(rng, count)
    text, tokens = vocabulary.text(rng, ids)
    assert (tokens, len(tokenizer.encode(text)), vocabulary.added) == (count, count + 1, 1)
    assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_texts_that_share_ids_share_tokens() -> None:
    tokenizer = word_tokenizer()
    vocabulary, rng = Vocabulary(tokenizer), np.random.default_rng(0)
    prefix = vocabulary.words(rng, 20)
    first, second = (tokenizer.encode(vocabulary.text(rng, prefix + vocabulary.words(rng, 5))[0]) for _ in range(2))
    assert first[:21] == second[:21]
    assert first != second


@pytest.mark.parametrize("make", [small_tokenizers.byte_level, small_tokenizers.sentencepiece])
def test_the_returned_length_is_counted_if_tokens_merge(make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    vocabulary, rng = Vocabulary(tokenizer), np.random.default_rng(0)
    text, tokens = vocabulary.text(rng, vocabulary.words(rng, 30))
    assert tokens == len(tokenizer.encode(text, add_special_tokens=False))


def test_special_tokens_are_never_drawn() -> None:
    tokenizer = word_tokenizer()
    assert 0 in tokenizer.skipped_ids
    assert 0 not in Vocabulary(tokenizer).ids(np.random.default_rng(0), 20_000)


def test_ids_need_only_a_vocabulary_size() -> None:
    drawn = Vocabulary(None, 10).ids(np.random.default_rng(0), 1000)
    assert set(drawn) == set(range(10))
    with pytest.raises(ConfigError, match="--vocab-size"):
        Vocabulary(None).ids(np.random.default_rng(0), 1)
    with pytest.raises(ConfigError, match="--tokenizer"):
        Vocabulary(None, 10).words(np.random.default_rng(0), 1)
