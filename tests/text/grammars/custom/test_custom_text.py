"""Texts in grammars of clients, as JSON has them, are exactly those that llguidance allows for the grammar itself."""

from __future__ import annotations

import functools
import json
import random
import re

import pytest
from llguidance import LLMatcher

from jaxserve.api_types import StructuredOutputs
from jaxserve.errors import InvalidRequestError
from jaxserve.text.grammars import character_sets as sets
from jaxserve.text.grammars.checking import GrammarChecker
from jaxserve.text.grammars.custom.custom_text import MAX_CHARACTERS, CustomText
from jaxserve.text.grammars.json_grammar import JsonGrammar
from jaxserve.text.grammars.rust_classes import named_class
from tests.selection import examples
from tests.server.tiny import tiny_tokenizer
from tests.text.grammars.custom.custom_grammars import GRAMMARS, PATCH
from tests.text.grammars.draw import accepts, drawn

# What often ends terminals of the grammars, in a text and in JSON.
OFTEN = '"]},:/*\\n\n'


@functools.cache
def held(definition: str, escaped: str = "", syntax: str = "lark") -> str:
    grammar = JsonGrammar(escaped=escaped)
    start = grammar.add(CustomText(syntax, definition))  # type: ignore[arg-type]
    return LLMatcher.grammar_from_lark("\n".join([f"start: {start}", *grammar.lines, ""]))


def spelled(text: str, escaped: str = "") -> str:
    """Return a text in JSON as it is held."""
    found = json.dumps(text, ensure_ascii=False)
    for one in (*escaped, "\x7f"):
        found = found.replace(one, f"\\u{ord(one):04x}")
    return found


def drawn_raw(definition: str, rng: random.Random) -> str | None:
    try:
        return drawn(LLMatcher.grammar_from_lark(definition), rng, most=200, often=OFTEN)
    except UnicodeDecodeError:
        return None


@pytest.mark.parametrize("escaped", ["", "<"])
@pytest.mark.parametrize("name", sorted(GRAMMARS))
def test_drawn_texts_are_in_the_grammar_and_all_its_texts_are_held(name: str, escaped: str) -> None:
    rng, definition = random.Random(1), GRAMMARS[name]
    for _ in range(examples(100, 8)):
        found = drawn(held(definition, escaped), rng, most=300, often=OFTEN)
        if found is not None:
            assert not escaped or escaped not in found
            assert accepts(LLMatcher.grammar_from_lark(definition), json.loads(found)), found
        text = drawn_raw(definition, rng)
        if text is not None and (text == text.rstrip() or "%ignore" not in definition):
            assert accepts(held(definition, escaped), spelled(text, escaped)), text


BEGIN, END = "*** Begin Patch\n", "*** End Patch"
HUNK = '*** Update File: a\\b.py\n@@ def f("x"):\n-\told \\n\n+<new>\t😀\x01\n \n*** End of File\n'


@pytest.mark.parametrize("escaped", ["", "<"])
@pytest.mark.parametrize(
    ("definition", "text", "is_in"),
    [
        (PATCH, f"{BEGIN}{HUNK}{END}", True),
        (PATCH, f'{BEGIN}*** Add File: "a"\n+\n+\\\n*** Delete File: \\n\n{HUNK}{END}\n', True),
        (PATCH, f"{BEGIN}*** Add File: a\n{END}", False),
        (PATCH, f"{BEGIN}{HUNK}", False),
        (GRAMMARS["arithmetic"], "1 +\t( 20.5*3 )", True),
        (GRAMMARS["arithmetic"], " 1", False),
        (GRAMMARS["sql"], "SeLECT a, b\nFROM\tſ WHERE x<>'\"\\';", False),
        (GRAMMARS["sql"], "SeLECT a, b\nFROM\tt WHERE x<>'\"\\';", True),
        (GRAMMARS["json_like"], '{"a\\"\\\\" : [ -1.5e3,\n"\\u00e9 é"],"":\ttrue}', True),
        (GRAMMARS["markup"], '<a>"x"\n\x1e<b>\\</b></a>', True),
        (GRAMMARS["records"], "a\x1e\x1fb\x1f\n\x1d\x7f\x1e", True),
        ('start: A B\nA: /(a|"b|\\x01b)+/\nB: /["\\n\\x01\\x02]c/', 'a"ba"c', False),
        ('start: A B\nA: /(a|"b|\\x01b)+/\nB: /["\\n\\x01\\x02]c/', "a\x01ba\x02c", True),
        ('start: A B\nA: /(a|"b|\\x01b)+/\nB: /["\\n\\x01\\x02]c/', "a\x01ba\x01c", False),
        ('start: A B\nA: /(a|"b)+/\nB: /["a]/', "aaa", False),
        ('start: A "x"\nA: /[^"x]*/', "\\x", True),
        ('start: A+ "\\""\nA: /[a"]/ & ~/"/', 'aa"', True),
        ('start: a b\na: [/a+/]\nb: | "\\n" b', "a\n\n\n", True),
        ('start: (/[^\\n]/ | "\\n\\n"){3,5}', 'a\n\n"', True),
        ('start: (/[^\\n]/ | "\\n\\n"){3,5}', "a\n\n", False),
        ('start: (/.+/ "\\n"){2}', "a\n\\\n", True),
    ],
)
def test_texts_of_grammars(definition: str, text: str, is_in: bool, escaped: str) -> None:
    assert accepts(LLMatcher.grammar_from_lark(definition), text) == is_in
    assert accepts(held(definition, escaped), spelled(text, escaped)) == is_in


def test_each_text_has_one_spelling() -> None:
    made = held(GRAMMARS["markup"], "<")
    assert accepts(made, r'"\u003ca>\u003c/a>"')
    for other in ('"<a></a>"', r'"\u003Ca>\u003c/a>"', r'"\u003ca>\u003c\/a>"', r'"\u003c\u0061>\u003c/a>"'):
        assert not accepts(made, other)


def test_regular_expressions_are_rusts() -> None:
    for pattern, text in (
        (r"\w+", "q\u0301"), (r"(?i)straße", "STRAẞE"), (r"[[:alpha:]\s]+", "a\x85b"), (".", "\r"),
        (r"\d\pN\p{Greek}", "1٣α"), (r"a\+\x{41}[^\n]*", 'a+A"\\\t'), (r"^ab$", "ab"), (r"[\w--]", None),
    ):  # fmt: skip
        if text is None:
            with pytest.raises(ValueError, match="a class within the class"):
                held(pattern, syntax="regex")
            continue
        assert accepts(LLMatcher.grammar_from_regex(pattern), text) or pattern[0] == "^"
        assert accepts(held(pattern, syntax="regex"), spelled(text)), pattern
    assert not accepts(held(r"\w", syntax="regex"), spelled("²"))


def test_letters_have_the_cases_of_rust() -> None:
    for one in "aKkſ\u212aßẞµςσǅΐﬆİıéÉ1<":
        assert sets.ignore_any_case(sets.characters(one)) == named_class(f"(?i:{one})"), one


@pytest.mark.parametrize(
    ("definition", "error"),
    [
        ('begin: "a"', "it has no rule `start`"),
        ('start: "a" <|end|>', "line 1: <|end|>: an input is a text"),
        ("start: <[12]>", "line 1: <[12]>: an input is a text"),
        ("start: @other", "line 1: @other: an input is a text"),
        ('start: a\na: %json {"type": "null"}', "line 2: `%json`: a JSON schema within a grammar is not supported"),
        ('start: %lark { start: "a" }', "line 1: `%lark`: a grammar within a grammar"),
        ('start: "a"\n%declare B', "line 2: `%declare`: this directive is not supported"),
        ("start: a\na[lazy]: /a+/", "line 2: the attribute `lazy` is not supported"),
        ("start: a\na[max_tokens=3]: /a+/", "line 2: the attribute `max_tokens` is not supported"),
        ('start.2: "a"', "line 1: priorities are not supported"),
        ('start: a{"x"}\na{b}: b', "line 2: rules with parameters"),
        ('start: A\n\nB: "x"', "line 1: A: it isn't defined"),
        ('start: A\nA: a\na: "x"', "line 2: a: a rule can't be part of a terminal"),
        ('start: A\nA: "x" A?', "line 2: the terminal A contains itself"),
        ('start: "a"\nstart: "b"', "line 2: start is defined twice"),
        ("start: /a(?=b)/", "line 1: /a(?=b)/: looking ahead"),
        ("start: /a/m", "line 1: /a/: the flag `m` is not supported"),
        ("%import common.NOTHING\nstart: NOTHING", "line 1: `common` has no terminal NOTHING; it has DIGIT"),
        ("%import other.WS\nstart: WS", "line 1: only terminals of `common`"),
        ("start: 'a'", "line 1: \"'a'\" is no part of Lark"),
        ('start: "a" & "b"', "line 1: `&` can stand in terminals only"),
        ('start: "a"{3,2}', "line 1: it can't be repeated 3 to 2 times"),
        ('start: "b".."a"', 'line 1: "b".."a" is no range of characters'),
        ('start: ("a"', "line 1: ')' should stand where 'the end' is"),
        ("start: start", "no text matches"),
        ("start: A0\n" + "".join(f"A{at}: A{at + 1} A{at + 1}\n" for at in range(40)) + 'A40: "x"', "are too large"),
        ("start: " + " ".join('"a"' for _ in range(6000)), "it has more than 5000 terminals"),
        ("x" * (MAX_CHARACTERS + 1), "at most 262144 are supported"),
    ],
)
def test_what_a_grammar_cannot_have_is_refused_by_name(definition: str, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        held(definition)


@pytest.mark.process
def test_a_grammar_without_texts_is_refused() -> None:
    checker = GrammarChecker(tiny_tokenizer())
    try:
        for definition in (r"start: A" + "\nA: /a/ & /b/", 'start: "x" A\nA: /a/ & ~/[a-c]/'):
            with pytest.raises(InvalidRequestError, match="tools can't be used"):
                checker.check(lambda definition=definition: held(definition), param="tools")  # type: ignore[misc]
        assert checker.check(lambda: held(PATCH), param="tools")
        assert checker.grammar(StructuredOutputs(regex="a"))
    finally:
        checker.close()
