"""Drafts by prompt lookup, against a search through the sequences."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ngram_lookup import NgramIndex, NgramLookup
from pallas_kernels.ngram_lookup.reference import look_up, remember

SLOTS, LENGTH, MOST = 3, 64, 16
LOOKUP = NgramLookup(max_drafts=4, longest=3, shortest=2)


_remember, _look_up = (jax.jit(one, static_argnames="lookup") for one in (remember, look_up))


def _index(entries: int = 512, namespaces: tuple[int, ...] = (7,) * SLOTS) -> NgramIndex:
    table = (SLOTS, len(LOOKUP.sizes), entries)
    return NgramIndex(
        history=jnp.zeros((SLOTS, LENGTH), jnp.int32),
        lengths=jnp.zeros(SLOTS, jnp.int32),
        namespaces=jnp.asarray(namespaces, jnp.int32),
        own=jnp.zeros(table, jnp.int32),
        shared=jnp.zeros(table, jnp.uint32),
    )


def _added(index: NgramIndex, slot: int, tokens: list[int], start: int = 0) -> NgramIndex:
    """Add tokens in a call of `MOST`, as in a program; the others have no slot."""
    slots, padded = np.full(MOST, -1, np.int32), np.zeros(MOST, np.int32)
    slots[: len(tokens)], padded[: len(tokens)] = slot, tokens
    return _remember(index, slots, np.arange(start, start + MOST, dtype=np.int32), padded, lookup=LOOKUP)


def _drafts(index: NgramIndex, slot: int) -> list[int]:
    tokens, counts = _look_up(index, np.array([slot], np.int32), lookup=LOOKUP)
    return np.asarray(tokens)[0, : int(counts[0])].tolist()


def test_what_followed_the_last_tokens_before() -> None:
    assert _drafts(_added(_index(), 0, [5, 6, 7, 8, 9, 10, 1, 5, 6]), 0) == [7, 8, 9, 10]


def test_the_latest_place_wins() -> None:
    assert _drafts(_added(_index(), 1, [5, 6, 1, 1, 5, 6, 2, 2, 5, 6]), 1) == [2, 2, 5, 6]


def test_a_longer_match_wins_over_a_later_one() -> None:
    assert _drafts(_added(_index(), 0, [4, 5, 6, 1, 1, 5, 6, 2, 2, 4, 5, 6]), 0)[:2] == [1, 1]


def test_a_draft_goes_on_with_itself_where_the_sequence_repeats() -> None:
    assert _drafts(_added(_index(), 0, [9, 1, 2, 1, 2]), 0) == [1, 2, 1, 2]


@pytest.mark.parametrize("tokens", [[], [3], [3, 3], [1, 2, 3, 4, 5], [0, 0]])
def test_nothing_is_found_where_nothing_was_before(tokens: list[int]) -> None:
    assert _drafts(_added(_index(), 0, tokens), 0) == []


def test_other_requests_of_the_namespace_are_found_and_no_others() -> None:
    index = _added(_added(_index(namespaces=(7, 7, 8)), 0, [1, 2, 3, 4, 5]), 1, [9, 2, 3])
    assert _drafts(index, 1) == [4, 5]
    assert _drafts(_added(index, 2, [9, 2, 3]), 2) == []


def test_the_own_sequence_comes_before_others() -> None:
    index = _added(_index(), 0, [1, 2, 3, 50, 51])
    assert _drafts(_added(index, 1, [2, 3, 60, 61, 8, 2, 3]), 1) == [60, 61, 8, 2]


def test_padding_and_tokens_past_the_end_change_nothing() -> None:
    index = _added(_index(), 0, [1, 2, 3])
    for slot, start in ((-1, 0), (SLOTS, 0), (0, LENGTH)):
        assert _drafts(_added(index, slot, [1, 2, 3, 1, 2], start), 0) == []


@pytest.mark.parametrize("entries", [512, 4])
def test_each_draft_follows_an_ngram_that_is_there(entries: int) -> None:
    """Also where most n-grams share an entry of the table; with room for all, what occurred before is always found."""
    rng = random.Random(entries)
    index, sequence, found = _index(entries), [], 0
    while len(sequence) < LENGTH:
        more = [rng.randrange(4) for _ in range(rng.randint(1, 5))][: LENGTH - len(sequence)]
        index = _added(index, 0, more, len(sequence))
        sequence += more
        drafts, tail = _drafts(index, 0), sequence[-2:]
        places = [i for i in range(2, len(sequence)) if sequence[i - 2 : i] == tail]
        if drafts:
            found += 1
            following = [(sequence[i:] * 4)[:4] for i in places]
            assert drafts in following
        else:
            assert not places or entries < 512
    assert found > 3
