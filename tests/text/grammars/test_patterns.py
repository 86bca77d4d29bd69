"""Patterns match what JavaScript and Python match, in a text and in JSON."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess

import pytest
from llguidance import LLMatcher

from jaxserve.text.grammars.pattern_parser import found_in, whole
from jaxserve.text.grammars.patterns import json_text, matches, regex, texts
from tests.selection import examples
from tests.text.grammars.draw import accepts, drawn

ATOMS = [
    *("a", "b", "-", "é", "😀", ".", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"\n", r"\x41", r"\u00e9", r"\.", r"\/"),
    *("[ab]", "[^a]", "[a-c-]", r"[\d-]", r"[^\w]", r"[\b]", "[a-z&&]", r"[[:alpha:]", r"\cA", r"\0", r"[\]\\^]"),
    *("(?:a|b)", "(a|bc)", "(?<name>a)", r"\p{Lu}", r"\P{L}", "[^]", r"\ud83d\ude00", r"\u{1F600}", "(|a)"),
]
REPEATS = ["", "", "", "?", "*", "+", "{2}", "{1,3}", "{0,}", "*?", "+?"]
CHARACTERS = "ab-é😀c.AZ1 \n\t\x01\x08\0/\\[]^&:٣қ\u2028\ufeff"
JAVASCRIPT = """
const cases = JSON.parse(require('fs').readFileSync(0, 'utf8'));
console.log(JSON.stringify(cases.map(([p, ts]) => { try { const r = new RegExp(p, 'u'); return ts.map(t => r.test(t)); }
catch (error) { return String(error); } })));
"""


def random_pattern(rng: random.Random) -> str:
    branches = []
    for _ in range(rng.choice([1, 1, 2])):
        atoms = "".join(rng.choice(ATOMS) + rng.choice(REPEATS) for _ in range(rng.randint(1, 4)))
        branches.append(rng.choice(["", "^"]) + atoms + rng.choice(["", "$"]))
    return "|".join(branches)


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(CHARACTERS, k=rng.randint(0, 5)))


@pytest.mark.process
@pytest.mark.skipif(shutil.which("node") is None, reason="Node is the judge")
def test_what_is_allowed_matches_in_javascript() -> None:
    """What a grammar draws always matches; and what doesn't match is what JavaScript refuses, but for named classes."""
    rng = random.Random(1)
    patterns = [random_pattern(rng) for _ in range(examples(3000, 400))]
    cases: list[tuple[str, list[str]]] = []
    for pattern in patterns:
        node = found_in(pattern)
        made = LLMatcher.grammar_from_lark(f"start: T\nT: /{json_text(node)}/")
        outputs = [drawn(made, rng, most=80) for _ in range(2)] if texts(node, 1) != set() else []
        found = [json.loads(one) for one in outputs if one is not None]
        assert all(matches(node, one) for one in found), (pattern, found)
        cases.append((pattern, [*found, *(random_text(rng) for _ in range(6))]))
    node_js = subprocess.run(
        ["node", "-e", JAVASCRIPT], input=json.dumps(cases), capture_output=True, text=True, check=True
    )
    for (pattern, tried), found in zip(cases, json.loads(node_js.stdout)):
        if isinstance(found, str):  # not with the flag `u`
            continue
        for text, expected in zip(tried, found):
            actual = matches(found_in(pattern), text)
            assert expected or not actual, (pattern, text)
            if not re.search(r"\\[dDwWsS]", pattern):
                assert actual == expected, (pattern, text)


def test_named_classes_match_in_python_too() -> None:
    rng = random.Random(2)
    for name in (r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"[^\w]", r"[^\S]", r"[\W\d]", r"[^\D]"):
        made = LLMatcher.grammar_from_regex(regex(found_in(f"^{name}+$")))
        for _ in range(20):
            text = drawn(made, rng)
            assert text is None or re.fullmatch(f"{name}+", text), (name, text)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"\w+", ["aé", "١"], ["a b", "́"]),
        (r"(?i)aB", ["ab", "AB"], ["é"]),
        (r"a(?i:b)c", ["aBc", "abc"], ["Abc"]),
        (r"(?s:.)\n", ["\n\n", "a\n"], ["a"]),
        (r"[]\d]x", ["]x", "1x"], ["x"]),
        (r"\Aa\Z", ["a"], ["aa"]),
        (r"^(a|b$)", ["a", "b"], ["ab"]),
        (r"(?P<year>[0-9]{2})", ["12"], ["1"]),
        (r"a{,x}", ["a{,x}"], ["a"]),
    ],
)
def test_a_regular_expression_of_a_form_is_pythons(pattern: str, good: list[str], bad: list[str]) -> None:
    made = LLMatcher.grammar_from_regex(regex(whole(pattern)))
    for text in (*good, *bad):
        assert accepts(made, text) == (text in good) == (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize(
    ("pattern", "error"),
    [
        ("(?=a)b", "looking ahead or behind, at 0, is not supported"),
        ("a(?<!b)", "looking ahead or behind, at 1, is not supported"),
        (r"a\bb", "the edge of a word, at 1, is not supported"),
        (r"(a)\1", "the reference to a group, at 3, is not supported"),
        ("(a", "the group at 0 doesn't end"),
        ("a)", "unmatched `)` at 1"),
        ("[a", "the class at 0 doesn't end"),
        ("[b-a]", "the range at 1 is out of order"),
        ("*a", "nothing to repeat at 0"),
        ("a**", "two quantifiers at 1"),
        ("a{3,2}", "`{3,2}` is out of order"),
        ("a{,3}", "differs between languages"),
        ("(a^b)", "`^` and `$` are supported at the start and the end only"),
        (r"\ud83d", "half a surrogate pair"),
        (r"\p{Greek}", "only general categories"),
        (r"\q", r"`\q` at 0 is not supported"),
        (r"\u12", r"`\u` at 0 needs 4 hexadecimal digits"),
        ("a\\", "it ends too early"),
        ("(?i)a", "the group at 0 is not supported"),
    ],
)
def test_what_a_pattern_cannot_have(pattern: str, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        found_in(pattern)
