"""What a grammar allows, step by step; slow grammars and broken ones; matchers are used again."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from jaxserve.engine.scheduling import grammars as module
from jaxserve.engine.scheduling.grammars import Allowed, Grammars, RequestGrammar
from tests.grammars import EOS, TOKENS, encode, small_vocabulary

REGEX = LLMatcher.grammar_from_regex


def _ids(mask: bytes) -> set[int]:
    return {index for index in range(len(mask) * 8) if mask[index // 8] >> index % 8 & 1}


def _grammar(text: str, **options: Any) -> RequestGrammar:
    given = {"stop_ids": (EOS,), "min_tokens": 0, "ignore_eos": False, "one_by_one": False} | options
    return RequestGrammar(text, **given)


def _follow(grammars: Grammars, grammar: RequestGrammar, *tokens: int) -> Allowed:
    for token in tokens:
        grammar.push(token)
    grammars.submit([grammar])
    assert grammar.job is not None
    grammar.job.result()
    found = grammar.next()
    assert found is not None
    return found


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(small_vocabulary)


def test_forced_tokens_then_a_choice_then_the_end(grammars: Grammars) -> None:
    grammar = _grammar(REGEX("hello[ab]world(c|d?)"))
    found = _follow(grammars, grammar)
    assert b"".join(TOKENS[token] for token in found.forced) == b"hello"
    assert _ids(found.tokens) == {*encode("a"), *encode("b")}
    found = _follow(grammars, grammar, *encode("a"))
    assert b"".join(TOKENS[token] for token in found.forced) == b"world"
    assert _ids(found.tokens) == {*encode("c"), *encode("d"), EOS}
    found = _follow(grammars, grammar, *encode("c"))
    assert found == Allowed(complete=True)


def test_one_by_one_forced_tokens_are_allowed_alone(grammars: Grammars) -> None:
    grammar = _grammar(REGEX("hello[ab]"), one_by_one=True)
    found, text = _follow(grammars, grammar), b""
    while len(allowed := _ids(found.tokens)) == 1:
        [token] = allowed
        text += TOKENS[token]
        assert found.forced == ()
        assert not grammar.push(token)
        following = grammar.next()
        assert following is not None
        found = following
    assert text == b"hello"
    assert allowed == {*encode("a"), *encode("b")}


def test_the_end_is_held_back(grammars: Grammars) -> None:
    assert EOS in _ids(_follow(grammars, _grammar(REGEX("[0-9]*"))).tokens)
    assert EOS not in _ids(_follow(grammars, _grammar(REGEX("[0-9]*"), ignore_eos=True)).tokens)
    grammar = _grammar(REGEX("[0-9]*"), stop_ids=(EOS, *encode("3")), min_tokens=2)
    assert _ids(_follow(grammars, grammar).tokens) == {*encode("012456789")}
    assert _ids(_follow(grammars, grammar, *encode("1")).tokens) == {*encode("012456789")}
    assert _ids(_follow(grammars, grammar, *encode("1")).tokens) == {*encode("0123456789"), EOS}
    ends = _grammar(REGEX("a(b)?"), ignore_eos=True)
    assert _ids(_follow(grammars, ends).tokens) == {*encode("b")}
    assert _follow(grammars, ends, *encode("b")).complete


def test_every_end_of_the_request_is_allowed_where_the_output_may_end(grammars: Grammars) -> None:
    grammar = _grammar(REGEX("[0-9]{2}a*"), stop_ids=(EOS, *encode("q")))
    digits, ends = {*encode("0123456789")}, {EOS, *encode("q")}
    assert _ids(_follow(grammars, grammar).tokens) == digits
    assert _ids(_follow(grammars, grammar, *encode("1")).tokens) == digits
    assert _ids(_follow(grammars, grammar, *encode("2")).tokens) == {*encode("a")} | ends
    unending = _grammar(REGEX("a*"), stop_ids=encode("q"), ignore_eos=True)
    assert _ids(_follow(grammars, unending).tokens) == {*encode("a")}


def test_a_grammar_that_the_vocabulary_cannot_write_is_an_error(grammars: Grammars) -> None:
    assert _follow(grammars, _grammar(REGEX("é"))).error
    assert _follow(grammars, _grammar("nonsense")).error


def test_a_vocabulary_that_cannot_be_loaded_is_an_error() -> None:
    def load() -> LLTokenizer:
        raise OSError("gone")

    assert _follow(Grammars(load), _grammar(REGEX("a"))).error == "OSError: gone"


def test_matchers_are_used_again_from_their_start(grammars: Grammars) -> None:
    text = REGEX("[ab]{3}")
    for _ in range(3):
        first, second = _grammar(text), _grammar(text)
        assert _follow(grammars, first) == _follow(grammars, second)
        _follow(grammars, first, *encode("ab"))
        assert _ids(_follow(grammars, second, *encode("a")).tokens) == {*encode("a"), *encode("b")}
        used = {first.matcher, second.matcher}
        grammars.release(first)
        grammars.release(second)
        again = _grammar(text)
        _follow(grammars, again)
        assert again.matcher in used
        assert _follow(grammars, again, *encode("bbb")).complete


def test_only_what_must_be_compiled_is_slow_at_first(grammars: Grammars) -> None:
    text = REGEX("[ab]{4}")
    _follow(grammars, _grammar(text))
    grammars._slow_threads.shutdown()
    assert _follow(grammars, _grammar(text)).error is None
    with pytest.raises(RuntimeError, match="after shutdown"):
        grammars.submit([_grammar(REGEX("[ab]{5}"))])


def test_a_slow_one_is_not_waited_for_and_ends(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    follow = Grammars._follow

    def slow(self: Grammars, grammar: RequestGrammar) -> Allowed:
        found, seconds = follow(self, grammar), time.thread_time()
        while "x" in grammar.text and time.thread_time() - seconds < 0.05:
            pass
        return found

    monkeypatch.setattr(Grammars, "_follow", slow)
    monkeypatch.setattr(module, "_MAX_SECONDS", 0.03)
    quick, late = _grammar(REGEX("[ab]{9}")), _grammar(REGEX("[abx]{9}"))
    for grammar in (quick, late):  # compiling may take longer
        assert _follow(grammars, grammar).error is None
    assert not quick.is_slow
    assert not late.is_slow
    for grammar in (quick, late):
        grammar.push(*encode("a"))
    grammars.submit([late])
    assert late.job is not None
    late.job.result()
    assert late.is_slow
    assert late.found.error == "it takes more than 0.03 s to find the next token"
    late.push(*encode("a"))
    grammars.submit([quick, late])
    assert late.job is not quick.job
    grammars.wait([quick, late], 10, also_slow=False)
    assert quick.job is not None
    assert quick.job.done()


class _AtOnce:
    """An executor whose jobs are done when `submit` returns, as those of a thread may be."""

    def submit(self, job: Callable[..., None], *arguments: Any) -> Future[None]:
        job(*arguments)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def test_one_that_becomes_slow_at_once_is_followed_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    first, grammar = (_grammar(REGEX("false|true")) for _ in range(2))
    _follow(grammars, first)  # it compiles
    monkeypatch.setattr(module, "_SLOW_SECONDS", 0.0)
    monkeypatch.setattr(grammars, "_threads", _AtOnce())
    _follow(grammars, grammar)
    grammar.is_slow = False
    found = _follow(grammars, grammar, *encode("f"))
    assert b"".join(TOKENS[token] for token in found.forced) == b"alse"
    assert found.complete
