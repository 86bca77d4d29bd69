"""A vocabulary of 64 tokens for grammars: letters, digits and a few longer tokens; the last one ends an output."""

from __future__ import annotations

import functools
import random
import string
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer

from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.scheduling.forced_runs import ForcedRuns
from jaxserve.engine.scheduling.grammars import Grammars, RequestGrammar
from jaxserve.engine.scheduling.step_times import StepTimes
from jaxserve.text.grammars.vocabulary import Tokens, make_vocabulary

EOS = 63
LONGER = [b"lo", b"world", b"{", b"}", b'":', b'"', b"[", b"]", b",", b":", b" "]
TOKENS = [*(char.encode() for char in string.ascii_lowercase + "ABCDEFGHIJKLMNOP" + string.digits), *LONGER, b""]

_REGEXES = [
    "hello([a-z]{2}world[0-9]){1,3}(end)?",
    "[a-c]{1,40}",
    "(one|two|three){2}",
    "abcdefghijklmnop",
    "[0-9]*",
    "x[ab]yz[cd]hellohello[ef]?",
]
_SCHEMA = '{"type":"object","properties":{"aa":{"type":"integer"},"hello":{"enum":["world","lo"]}},"required":["aa"]}'


def encode(text: str) -> list[int]:
    """Return the ids of a text, the longest tokens first."""
    ids, data = [], text.encode()
    while data:
        best = max((token for token in TOKENS if token and data.startswith(token)), key=len, default=data[:1])
        ids.append(TOKENS.index(best) if best in TOKENS else 0)
        data = data[len(best) :]
    return ids


@functools.cache
def small_vocabulary() -> LLTokenizer:
    """Return llguidance's vocabulary of these tokens."""
    assert len(TOKENS) == EOS + 1
    return make_vocabulary(Tokens(TOKENS, [EOS], None, [EOS]), encode)


@functools.cache
def small_grammars() -> Grammars:
    """Return the grammars that tests share, with their threads."""
    return Grammars(small_vocabulary)


def random_grammar(rng: random.Random) -> str:
    """Return a grammar for outputs of at most about 40 tokens."""
    if rng.random() < 0.2:
        return LLMatcher.grammar_from_json_schema(_SCHEMA, defaults={"whitespace_flexible": False})
    return LLMatcher.grammar_from_regex(rng.choice(_REGEXES))


def first_allowed(token: int, mask: bytes, size: int) -> int:
    """Return the first allowed token from `token` on, in a circle of `size` tokens."""
    bits = int.from_bytes(mask, "little")
    return next(other for i in range(size) if bits >> (other := (token + i) % size) & 1)


class RandomRuns(ForcedRuns):
    """Computes runs of forced tokens together or one by one, whatever they cost."""

    def __init__(self, times: StepTimes, rng: random.Random) -> None:
        super().__init__(times)
        self._random = rng

    def together(self, decodes: Sequence[int], runs: Sequence[Sequence[int]]) -> bool:
        super().together(decodes, runs)
        return self._random.random() < 0.7


class _InTurn(ThreadPoolExecutor):
    """Runs each job before `submit` returns."""

    def submit[**P, T](self, call: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> Future[T]:
        future = Future[T]()
        future.set_result(call(*args, **options))
        return future


def follow_in_turn(loop: EngineLoop) -> EngineLoop:
    """Let an engine wait for each grammar, so that a test's schedule depends on nothing but its seed."""
    awaiting = loop._scheduler._awaiting
    assert awaiting is not None
    grammars = awaiting._grammars
    grammars._threads = grammars._slow_threads = _InTurn()
    return loop


def run_at_random(loop: EngineLoop, rng: random.Random) -> EngineLoop:
    """Let an engine compute runs of forced tokens together or one by one, at random."""
    planner = loop._scheduler._planner
    planner.runs = RandomRuns(planner.times, rng)
    return loop


def follow(grammar: RequestGrammar) -> None:
    """Find out what a grammar allows next, now."""
    small_grammars().submit([grammar])
    assert grammar.job is not None
    grammar.job.result()
