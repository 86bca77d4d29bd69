"""Grammars are checked within limits, and one that takes too long delays no other."""

from __future__ import annotations

import multiprocessing
import string
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.api_types import StructuredOutputs
from jaxserve.errors import InvalidRequestError
from jaxserve.text.grammars.checking import GrammarChecker
from jaxserve.text.grammars.formats import grammar_of
from tests.server.tiny import tiny_tokenizer

pytestmark = pytest.mark.process

# Each pattern alone is small; whether a text matches all of them takes hours to find out.
EXPLODING = {"allOf": [{"type": "string", "pattern": f"[a-z]{{3}}{letter}[0-9]*"} for letter in string.ascii_lowercase]}
FINE = StructuredOutputs(json={"type": "integer"})


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(tiny_tokenizer(), cpu_seconds=1.0)
    yield checker
    checker.close()


def test_what_compiles_is_returned(checker: GrammarChecker) -> None:
    assert checker.grammar(FINE) == grammar_of(FINE)


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ({"json": {"type": "string", "pattern": "(?=a)"}}, "looking ahead or behind"),
        ({"regex": "(a"}, "the group at 0 doesn't end"),
        ({"json": {"type": "object", "minProperties": 2, "not": {}}}, "not"),
        ({"json": {"$ref": "https://example.com/schema"}}, "is not in this document"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "no value matches"),
        ({"grammar": "start: missing"}, "missing"),
        (
            {"json": {"properties": {"a": {"type": "string", "pattern": "^b$", "minLength": 2}}}},
            "properties.a: no text",
        ),
        ({"grammar": 'start: "a" B\nB: /x/ & /y/'}, "where no token of the vocabulary may follow, after 'a'"),
        ({"grammar": 'start: ("a" | "b" | "c" B)+\nB: /x/ & /y/'}, "may follow, after "),
        ({"json": {"oneOf": [{"type": "integer", "minimum": 1}, {"type": "integer", "maximum": 3}]}}, "oneOf"),
        ({"json": {"oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}]}}, "oneOf"),
    ],
)
def test_what_does_not_compile_is_refused_with_the_reason(
    checker: GrammarChecker, outputs: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        checker.grammar(StructuredOutputs(**outputs), param="response_format")
    assert str(caught.value).startswith("response_format can't be used: ")
    assert caught.value.param == "response_format"


def test_what_is_left_to_the_client_is_logged_once(checker: GrammarChecker, caplog: pytest.LogCaptureFixture) -> None:
    form = StructuredOutputs(json={"type": "array", "uniqueItems": True})
    with caplog.at_level("INFO", "jaxserve"):
        checker.grammar(form)
        checker.grammar(form)
    assert caplog.messages == ["uniqueItems is left to the client: a grammar can't hold it"]
    with pytest.raises(InvalidRequestError, match="uniqueItems can't be held"):
        checker.grammar(StructuredOutputs(json=form.json, strict=True))


def test_closing_waits_for_no_process_that_was_forked_meanwhile() -> None:
    checker = GrammarChecker(tiny_tokenizer())
    checker.grammar(FINE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forks of a process with threads
        other = multiprocessing.get_context("fork").Process(target=threading.Event().wait)
        other.start()
    closing = threading.Thread(target=checker.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    other.kill()
    other.join()


def test_one_that_takes_too_long_is_refused_and_delays_no_other(checker: GrammarChecker) -> None:
    checker.grammar(FINE)
    errors: list[InvalidRequestError] = []

    def check() -> None:
        with pytest.raises(InvalidRequestError) as caught:
            checker.grammar(exploding)
        errors.append(caught.value)

    refused = threading.Thread(target=check)
    exploding = StructuredOutputs(json=EXPLODING)
    refused.start()
    checked = 0
    while refused.is_alive() or not checked:
        checker.grammar(StructuredOutputs(choice=(f"number {checked}",)))
        checked += 1
        time.sleep(0.001)
    assert checked > 3
    check()  # from memory: no second goes by
    assert [str(error) for error in errors] == [
        "structured_outputs can't be used: it takes more than 1 s to compile"
    ] * 2


def test_it_goes_on_when_a_child_has_ended() -> None:
    checker = GrammarChecker(tiny_tokenizer())
    checker.grammar(FINE)
    [child] = checker._idle
    child.kill()
    child.wait()
    checker.grammar(StructuredOutputs(choice=("a",)))
    assert [other.pid for other in checker._idle] != [child.pid]
    checker.close()
