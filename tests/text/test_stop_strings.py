from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.text.stop_strings import StopMatcher

TEXTS = st.text("ab ", max_size=20)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Return the text up to the first character that completes a stop string, and the longest one completed there."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def run(parts: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    matcher, shown = StopMatcher(stops, include), ""
    for part in parts:
        text, matched = matcher.push(part)
        shown += text
        if matched is not None:
            return shown, matched
    return shown + matcher.flush(), None


@given(TEXTS, STOPS, st.booleans(), st.data())
def test_any_split_gives_the_same_as_the_whole(text: str, stops: list[str], include: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]

    assert run(parts, stops, include) == expected(text, stops, include)


@given(TEXTS, STOPS)
def test_exactly_the_possible_starts_of_a_stop_string_are_held_back(text: str, stops: list[str]) -> None:
    matcher, shown = StopMatcher(stops, False), ""
    for end, char in enumerate(text, start=1):
        part, matched = matcher.push(char)
        shown += part
        if matched is not None:
            return
        begun = [length for stop in stops for length in range(len(stop)) if text[:end].endswith(stop[:length])]
        assert shown == text[: end - max(begun)]


def test_across_pushes() -> None:
    matcher = StopMatcher(["\n\nUser:"], False)

    assert matcher.push("Hi.\n") == ("Hi.", None)
    assert matcher.push("\nUs") == ("", None)
    assert matcher.push("ed car\n\nUser") == ("\n\nUsed car", None)
    assert matcher.push(": what") == ("", "\n\nUser:")


def test_included() -> None:
    assert StopMatcher(["END"], True).push("the END of") == ("the END", "END")


def test_flush_returns_the_held_back_text() -> None:
    matcher = StopMatcher(["END"], False)

    assert matcher.push("the EN") == ("the ", None)
    assert matcher.flush() == "EN"
    assert matcher.flush() == ""


def test_the_first_completed_then_the_longest_stop_string_wins() -> None:
    assert StopMatcher(["abcd", "bc"], False).push("abcd") == ("a", "bc")
    assert StopMatcher(["bc", "abc"], False).push("abcd") == ("", "abc")


def test_the_cost_of_a_long_stop_string_is_linear_in_the_text() -> None:
    stop = "a" * 50_000 + "b"
    matcher = StopMatcher([stop], False)

    assert matcher.push("a" * 60_000) == ("a" * 10_000, None)
    assert matcher.push("b") == ("", stop)
