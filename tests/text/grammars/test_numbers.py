"""Expressions of numbers within bounds hold no other number, whether it is read exactly or as a float."""

from __future__ import annotations

import operator
import re
from decimal import Decimal, localcontext

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxserve.text.grammars.numbers import Bound, integer_regex, number_regex
from tests.selection import examples

INTEGERS = st.one_of(
    st.integers(-20, 20),
    st.integers(0, 60).flatmap(lambda size: st.integers(-(10**size), 10**size)),
    st.sampled_from([2**53 + 1, 2**63 - 1, -(2**63), 2**64, 10**20, 10**21, 10**120, -(10**101) + 7]),
).map(Decimal)
DECIMALS = st.one_of(
    INTEGERS.filter(lambda value: abs(value) < 10**30),
    st.floats(-2, 2).map(repr).map(Decimal),
    st.decimals(-1000, 1000, places=2),
    st.sampled_from(["3.4028234663852886e38", "1.7976931348623157e308", "1e-300", "-1e-20", "1e-7", "2e300"]).map(
        Decimal
    ),
)
STEPS = [
    Decimal(step)
    for step in ("0", "1", "-1", "10", "-10", ".1", "-.1", ".5", "-.01", "1e-10", "1e-13", "-1e-13", "-1e-14", "1e-16")
]


def is_within(value: Decimal | float, low: Bound | None, high: Bound | None) -> bool:
    kind = type(value)
    above = low is None or (operator.gt if low.open else operator.ge)(value, kind(low.value))
    return above and (high is None or (operator.lt if high.open else operator.le)(value, kind(high.value)))


def bounds(values: st.SearchStrategy[Decimal]) -> st.SearchStrategy[Bound | None]:
    return st.one_of(st.none(), st.builds(Bound, values, st.booleans()))


def check(expression: str, low: Bound | None, high: Bound | None, *, integers: bool) -> None:
    pattern = re.compile(expression) if expression else None
    values = {end.value + step for end in (low, high) if end is not None for step in STEPS}
    values |= {Decimal(0), Decimal("0.5"), Decimal(-3)}
    # Numbers that a float doesn't tell from an end.
    values |= {end.value * (1 + Decimal(part)) for end in (low, high) if end for part in ("1e-16", "-1e-16", "-1e-17")}
    values |= {(low.value + high.value) / 2} if low is not None and high is not None else set()
    for value in values:
        plain = f"{value:f}"
        short = plain.rstrip("0").rstrip(".") if "." in plain else plain
        for text in {plain, short, f"{value:.5e}", f"{value:.16e}"}:
            allowed = pattern is not None and pattern.fullmatch(text) is not None
            inside = is_within(Decimal(text), low, high)
            assert inside or not allowed, text
            if allowed and not integers:
                assert is_within(float(text), low, high), text
            is_short = len(text.strip("-").replace(".", "")) <= 13 and "e" not in text
            is_short = is_short and not (low is not None and high is not None and low.value == high.value)
            if inside and (is_short or (integers and len(text) < 90)) and not (integers and set(text) & set(".e")):
                assert allowed, text


@settings(max_examples=examples(4000, 300))
@given(bounds(INTEGERS), bounds(INTEGERS))
def test_integers(low: Bound | None, high: Bound | None) -> None:
    with localcontext(prec=500):
        check(integer_regex(low, high), low, high, integers=True)


@settings(max_examples=examples(4000, 300))
@given(bounds(DECIMALS), bounds(DECIMALS))
def test_numbers(low: Bound | None, high: Bound | None) -> None:
    # No number that is neither tiny nor huge is within these.
    assume(low is None or low.value < Decimal("1e308"))
    with localcontext(prec=500):
        check(number_regex(low, high), low, high, integers=False)


def test_large_bounds_have_short_expressions() -> None:
    largest = Bound(Decimal(int(1.7976931348623157e308)))
    lowest = Bound(-largest.value)
    assert len(integer_regex(lowest, largest)) < 4000
    assert len(number_regex(lowest, largest)) < 16000
