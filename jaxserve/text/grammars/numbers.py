"""Regular expressions of JSON numbers within bounds of any size. A number that matches is within them for any reader.

Not every number within the bounds has an expression. One with a fraction has no more digits than a reader with 64-bit
floats tells apart, and one with an exponent has one digit before the point.
"""

from __future__ import annotations

import decimal
import functools
import math
import sys
from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import NamedTuple

# Numbers with more digits before the point have an exponent.
_MAX_PLAIN = 40
# Decimal digits that a 64-bit float always keeps, and its exponents.
_DIGITS = 15
_MIN_EXPONENT = -307
_SMALLEST = Decimal(10) ** -_DIGITS
_EXACT = 2**53
# Integer bounds with more digits are narrowed to their first `_KEPT` digits.
_MAX_INTEGER = 100
_KEPT = 20
# More digits than a number in JSON has here.
_PRECISION = 5000

NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
INTEGER = "-?(?:0|[1-9][0-9]*)"


class Bound(NamedTuple):
    """An end of a range of numbers, which belongs to it unless it is `open`."""

    value: Decimal
    open: bool = False


_LARGEST = Bound(Decimal(repr(sys.float_info.max)))


def integer_ends(low: Bound | None, high: Bound | None) -> tuple[int | None, int | None]:
    """Return the least and the largest integer within bounds; the first is larger if there are none."""
    least = None if low is None else math.ceil(low.value) + (low.open and low.value == math.ceil(low.value))
    most = None if high is None else math.floor(high.value) - (high.open and high.value == math.floor(high.value))
    return least, most


def _exact(function: Callable[[Bound | None, Bound | None], str]) -> Callable[[Bound | None, Bound | None], str]:
    """Return a function that rounds no decimal number."""

    @functools.wraps(function)
    def call(low: Bound | None, high: Bound | None) -> str:
        with decimal.localcontext(prec=_PRECISION):
            return function(low, high)

    return call


@_exact
def integer_regex(low: Bound | None, high: Bound | None) -> str:
    """Return the expression of all integers within bounds, "" if there are none. None is no bound."""
    least, most = integer_ends(low, high)
    if least is None and most is None:
        return INTEGER
    options = []
    if (least is None or least < 0) and (
        rest := _naturals(max(1, -most) if most is not None else 1, None if least is None else -least)
    ):
        options.append(f"-{rest}")
    if (most is None or most >= 0) and (rest := _naturals(max(0, least or 0), most)):
        options.append(rest)
    return _any(options)


def _naturals(least: int, most: int | None, fraction: int = 0, longest: int | None = None) -> str:
    """Return the expression of the natural numbers from `least` to `most`, with `fraction` digits after a point.

    Numbers of more than `longest` digits in all are left out.
    """
    if most is not None and least > most:
        return ""
    shortest = str(least).rjust(fraction + 1, "0")
    highest = "9" * len(shortest) if most is None else str(most).rjust(fraction + 1, "0")
    if longest is not None and len(highest) > longest:
        most, highest = 0, "9" * longest
    options = []
    for size in range(len(shortest), len(highest) + 1):
        low = shortest if size == len(shortest) else "1" + "0" * (size - 1)
        if size in (len(shortest), len(highest)):
            options.append(_same_length(low, highest if size == len(highest) else "9" * size, size - fraction))
        elif size == len(shortest) + 1:  # all sizes between at once
            options.append(f"[1-9]{_digits(size - 1 - fraction, len(highest) - 2 - fraction)}{_run(0, 0, fraction)}")
    if most is None:
        options.append(f"[1-9]{_digits(len(shortest) - fraction, None)}{_run(0, 0, fraction)}")
    return _any(options)


def _same_length(low: str, high: str, point: int, at: int = 0) -> str:
    """Return the expression of the texts of digits between two of one length, with a point before the digit `point`.

    `at` is the index of the first digit.
    """
    if len(low) > _MAX_INTEGER:
        first, last = int(low[:_KEPT]), int(high[:_KEPT])
        first += low[_KEPT:].strip("0") != ""
        last -= high[_KEPT:].strip("9") != ""
        if first <= last:
            return _same_length(str(first), str(last), point) + _run(point, _KEPT, len(low))
    if not low:
        return ""
    dot = r"\." if at == point else ""
    if not low.strip("0") and not high.strip("9"):
        return _run(point, at, at + len(low))
    if low[0] == high[0]:
        return f"{dot}{low[0]}{_same_length(low[1:], high[1:], point, at + 1)}"
    options = []
    first, last = int(low[0]), int(high[0])
    if low[1:].strip("0"):
        options.append(f"{low[0]}{_same_length(low[1:], '9' * len(low[1:]), point, at + 1)}")
        first += 1
    ending = []
    if high[1:].strip("9"):
        ending = [f"{high[0]}{_same_length('0' * len(high[1:]), high[1:], point, at + 1)}"]
        last -= 1
    if first <= last:
        options.append(f"{_digit(first, last)}{_run(point, at + 1, at + len(low))}")
    return dot + _any(options + ending)


def _run(point: int, start: int, end: int) -> str:
    """Return the expression of any digits from the index `start` to `end`, with a point before the digit `point`."""
    if not start <= point < end:
        return _digits(end - start, end - start)
    return rf"{_digits(point - start, point - start)}\.{_digits(end - point, end - point)}"


@_exact
def number_regex(low: Bound | None, high: Bound | None) -> str:
    """Return an expression of numbers within bounds, "" if there are none. None is no bound."""
    if low is None and high is None:
        return NUMBER
    if _may_round_onto_open_end(low, high):
        low, high = _closed(low, 1), _closed(high, -1)
    if low is not None and high is not None and low.value == high.value:
        return "" if low.open or high.open else _exactly(low.value)
    zero = Bound(Decimal(0), open=True)
    options = []
    if low is None or low.value < 0:
        nearest = zero if high is None or high.value >= 0 else _negated(high)
        if rest := _positive(nearest, None if low is None else _negated(low)):
            options.append(f"-{rest}")
    if (low is None or low.value < 0 or not low.open) and _is_within(Decimal(0), low, high):
        options.append(rf"0(?:\.0{{1,{_DIGITS}}})?")
    if high is None or high.value > 0:
        nearest = zero if low is None or low.value <= 0 else low
        if rest := _positive(nearest, high):
            options.append(rest)
    return _any(options)


def _may_round_onto_open_end(low: Bound | None, high: Bound | None) -> bool:
    """Return whether a number with as many digits as a bound may be an open bound once it is a 64-bit float."""
    values = [end.value for end in (low, high) if end is not None]
    most = max(len(value.normalize().as_tuple().digits) for value in values)
    fraction = max((_num_fraction_digits(value) for value in values if abs(value) >= _SMALLEST), default=0)
    return any(
        max(most, end.value.adjusted() + 1 + fraction) > _DIGITS or abs(end.value) >= _EXACT
        for end in (low, high)
        if end is not None and end.open and end.value
    )


def _closed(bound: Bound | None, direction: int) -> Bound | None:
    """Return a bound that isn't open, at the nearest float within an open one."""
    if bound is None or not bound.open or not bound.value:
        return bound
    nearest = math.nextafter(float(bound.value), direction * math.inf)
    return Bound(Decimal(nearest)) if math.isfinite(nearest) else bound


def _negated(bound: Bound) -> Bound:
    return Bound(-bound.value, bound.open)


def _is_within(value: Decimal, low: Bound | None, high: Bound | None) -> bool:
    return (low is None or low.value < value or (low.value == value and not low.open)) and (
        high is None or value < high.value or (value == high.value and not high.open)
    )


def _exactly(value: Decimal) -> str:
    if value == value.to_integral_value():
        return str(int(value))
    return str(value).replace(".", r"\.").replace("E", "e")


def _positive(low: Bound, high: Bound | None) -> str:
    """Return the expression of positive numbers, plain and with exponents."""
    options = []
    plain = Bound(Decimal(10) ** _MAX_PLAIN, open=True)
    if low.value < plain.value and (high is None or high.value >= _SMALLEST):
        options += _plain(low, plain if high is None or high.value > plain.value else high)
    if high is None or high.value >= plain.value or low.value < _SMALLEST:
        options += _with_exponents(low, high)
    return _any(options)


def _plain(low: Bound, high: Bound) -> list[str]:
    """Return the expressions of positive numbers without exponents, one for each number of digits after the point."""
    given = max(_num_fraction_digits(one.value) for one in (low, high) if one.value >= _SMALLEST)
    options = []
    for fraction in range(max(given, _DIGITS) + 1):
        scaled_low, scaled_high = low.value.scaleb(fraction), high.value.scaleb(fraction)
        least = math.ceil(scaled_low) + (low.open and scaled_low == math.ceil(scaled_low))
        most = math.floor(scaled_high) - (high.open and scaled_high == math.floor(scaled_high))
        longest = None if fraction <= given else _DIGITS
        if longest is None or (fraction < longest and len(str(least)) <= longest):
            options.append(_naturals(least, most, fraction, longest))
    return [one for one in options if one]


def _num_fraction_digits(value: Decimal) -> int:
    exponent = value.normalize().as_tuple().exponent
    assert isinstance(exponent, int)
    return max(0, -exponent)


def _with_exponents(low: Bound, high: Bound | None) -> list[str]:
    """Return the expressions of positive numbers with an exponent: of whole decades, and of the first and the last."""
    first = max(low.value.adjusted() if low.value else _MIN_EXPONENT, _MIN_EXPONENT)
    high = high if high is not None and high.value < _LARGEST.value else _LARGEST
    last = high.value.adjusted()
    options = []
    for exponent in sorted({first, last}):
        begin, end = Bound(Decimal(10) ** exponent), Bound(Decimal(10) ** (exponent + 1), open=True)
        below = low if low.value > begin.value or (low.value == begin.value and low.open) else begin
        above = high if high.value < end.value else end
        if first <= last and below.value <= above.value:
            mantissa = _plain(_mantissa(below, exponent, ROUND_CEILING), _mantissa(above, exponent, ROUND_FLOOR))
            options += [f"{_any(mantissa)}[eE]{_exponent(exponent, exponent)}"] if mantissa else []
    if first + 1 < last:
        options.append(rf"[1-9](?:\.{_digits(1, _DIGITS - 1)})?[eE]{_exponent(first + 1, last - 1)}")
    return options


def _mantissa(bound: Bound, exponent: int, rounding: str) -> Bound:
    """Return a bound divided by a power of ten, without more digits than a float has."""
    value = bound.value.scaleb(-exponent)
    rounded = decimal.Context(_DIGITS + 2, rounding).plus(value)
    return Bound(rounded, bound.open and rounded == value)


def _exponent(least: int, most: int) -> str:
    options = []
    if most >= 0:
        options.append(rf"\+?{_naturals(max(0, least), most)}")
    if least < 0:
        options.append(f"-{_naturals(max(1, -most), -least)}")
    return _any(options)


def _digit(first: int, last: int) -> str:
    return str(first) if first == last else f"[{first}-{last}]"


def _digits(least: int, most: int | None) -> str:
    """Return the expression of `least` to `most` digits; None is no limit."""
    if most == 0:
        return ""
    if least == most:
        return "[0-9]" if most == 1 else f"[0-9]{{{most}}}"
    return f"[0-9]{{{least},{'' if most is None else most}}}"


def _any(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})" if options else ""
