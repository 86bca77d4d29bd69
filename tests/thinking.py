"""Budgets for reasoning in the vocabulary of `tests.grammars`, and when they are used up, found from whole outputs."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from jaxserve.api_types import ThinkingBudget
from jaxserve.text.answers.thought_marks import make_marks
from tests.grammars import TOKENS, encode

# Texts of one token, of a part of one, and of several, for the beginning and the end of reasoning. Where one begins
# another, the shorter one comes first: it is read as soon as it is there.
_BEGINS = ((b"ab", *(bytes((char,)) for char in b"cdefghijklm")), (b" ", b"w", b"x", b"y", b"z"), (b"or", b"lo"))
_ENDS = ((b"b",), (b"lo", b"Q7"), (b"ld", b"P7"), (b"z", b"zz", b"w"), (b"never",))
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


def is_used_up(budget: ThinkingBudget, outputs: Sequence[int], pieces: Sequence[bytes] = TOKENS) -> bool:
    """Return whether reasoning goes on after `outputs` and has all tokens of its budget, read from the start."""
    inside = [_is_inside(budget, b"".join(pieces[token] for token in outputs[:i])) for i in range(len(outputs) + 1)]
    return inside[-1] and sum(map(int.__and__, inside, inside[1:])) >= budget.num_tokens


def _is_inside(budget: ThinkingBudget, text: bytes) -> bool:
    """Return whether a text ends inside of its reasoning."""
    begins, ends = (re.compile(b"|".join(map(re.escape, texts))) for texts in (budget.begins, budget.ends))
    at = 0
    if budget.once and not budget.inside:
        at = len(text) - len(text.lstrip())
        found = begins.match(text, at)
        return found is not None and ends.search(text, found.end()) is None
    inside = budget.inside
    while found := (ends if inside else begins).search(text, at):
        if inside and budget.once:
            return False
        at, inside = found.end(), not inside
    return inside
