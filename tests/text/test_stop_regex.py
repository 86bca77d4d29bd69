from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError
from jaxserve.text.stop_strings import StopMatcher

TEXTS = st.text("abc1\n ", max_size=16)
ATOMS = st.sampled_from(["a", "b", "c", r"\d", ".", "[ab]", "[^a]", r"\s", "(?i:A)"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "{0,2}?"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
    ),
    max_leaves=5,
)


def expected(text: str, stops: list[str], patterns: list[str], include: bool) -> tuple[str, str | None]:
    """Return the result by Python's `re`: the first character that completes a match, and the longest match there."""
    for end in range(1, len(text) + 1):
        found = [(len(stop), 1, stop) for stop in stops if text[:end].endswith(stop)]
        for pattern in patterns:
            starts = [start for start in range(end) if re.compile(pattern).fullmatch(text, start, end)]
            found += [(end - start, 0, pattern) for start in starts]
        if found:
            length = max(found)[0]
            stop = next(stop for size, _, stop in sorted(found, key=lambda one: -one[1]) if size == length)
            return text[: end if include else end - length], stop
    return text, None


def run(parts: list[str], matcher: StopMatcher) -> tuple[str, str | None]:
    shown = ""
    for part in parts:
        text, matched = matcher.push(part)
        shown += text
        if matched is not None:
            return shown, matched
    return shown + matcher.flush(), None


@given(TEXTS, st.lists(st.text("ab", min_size=1, max_size=3), max_size=2), PATTERNS, st.booleans(), st.data())
def test_any_split_finds_the_same_as_pythons_re(
    text: str, stops: list[str], pattern: str, include: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]

    assert run(parts, StopMatcher(stops, include, [pattern])) == expected(text, stops, [pattern], include)


def test_only_a_possible_match_is_held_back() -> None:
    matcher = StopMatcher([], False, [r"\d+ km", "END"])

    assert matcher.push("It is 4") == ("It is ", None)
    assert matcher.push("2 m and E") == ("42 m and ", None)
    assert matcher.push("N 7 k") == ("EN ", None)
    assert matcher.push("m off") == ("", r"\d+ km")


def test_flags_and_several_patterns() -> None:
    assert StopMatcher([], True, ["(?i)stop", "x{3}"]).push("please SToP now") == ("please SToP", "(?i)stop")
    assert StopMatcher(["xxx"], False, ["(?s)a.b"]).push("a\nbxxx") == ("", "(?s)a.b")


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", "not a valid regular expression"),
        ("a{99999999999999}", "not a valid regular expression"),
        ("a^", "uses at"),
        ("a$|b", "uses at"),
        (r"a\b", "uses at"),
        ("a(?=b)", "uses assert"),
        (r"(a)\1", "uses groupref"),
        ("(a{100}){100}", "too large"),
        ("a{1000000000}", "too large"),
        ("(?:a?){200}b", "too large"),
        ("(" * 5000 + "a" + ")" * 5000, "regular expression"),
    ],
)
def test_unsupported_patterns_are_refused(pattern: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as raised:
        StopMatcher([], False, [pattern])
    assert raised.value.param == "stop_regex"


def test_anchors_and_the_empty_text() -> None:
    assert StopMatcher([], False, ["^ab"]).push("xab") == ("xab", None)
    assert StopMatcher([], False, ["^ab"]).push("abx") == ("", "^ab")
    assert StopMatcher([], False, ["b+$"]).push("abbx") == ("a", "b+$")
    assert StopMatcher([], False, ["b*"]).push("ab") == ("a", "b*")
    assert StopMatcher([], False, ["^$", "x{0}"]).push("ab") == ("ab", None)


def test_a_pattern_with_exponential_backtracking_is_fast() -> None:
    assert StopMatcher([], False, ["(?:a+)+b"]).push("a" * 2000) == ("", None)
