"""Budgets for reasoning in the vocabulary of `tests.grammars`."""

from __future__ import annotations

import random

from jaxserve.api_types import ThinkingBudget
from jaxserve.text.answers.thought_marks import make_marks
from tests.grammars import TOKENS, encode

# Texts of one token, of a part of one, and of several, for the beginning and the end of reasoning.
_BEGINS = ((b"ab", *(bytes((char,)) for char in b"cdefghijklm")), (b" ", b"w", b"x", b"y", b"z"), (b"or", b"lo"))
_ENDS = ((b"b",), (b"lol", b"lo"), (b"ld", b"P7"), (b"z", b"zz", b"w"), (b"never",))
_CLOSINGS = (("b",), ("lo", "world"), ("P7", "lol"), ("zw", "ldP7"), ("never", "never"))


def random_budget(rng: random.Random) -> ThinkingBudget:
    """Return a budget of a few tokens, of reasoning that comes once or again, between texts of any kind."""
    once = rng.random() < 0.5
    kind = rng.randrange(len(_ENDS))
    closings = tuple(tuple(encode(text)) for text in _CLOSINGS[kind])
    begins = _BEGINS[rng.randrange(len(_BEGINS))]
    if set(begins) & set(_ENDS[kind]):
        begins = (b"Q", b"0")
    marks = make_marks(TOKENS, begins, _ENDS[kind], closings, once=once)
    return marks.budget(rng.choice([0, 1, 2, 3, rng.randint(4, 20)]), inside=rng.random() < 0.6)
