"""The formats of texts that JSON schemas name, as patterns. Each matches only texts of the format, if not all of them.

Dates and times follow RFC 3339, durations its appendix, mail addresses and hosts RFC 5321, URIs RFC 3986.
"""

from __future__ import annotations

import functools

from jaxserve.text.grammars.pattern_parser import found_in
from jaxserve.text.grammars.patterns import Node

_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_LEAP}|(?:{_LEAP}00))"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = f"{_LABEL}(?:\\.{_LABEL})*"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join((
    f"(?:{_GROUP}:){{7}}{_GROUP}",
    *(f"(?:{_GROUP}:){{{count}}}(?::{_GROUP}){{1,{7 - count}}}" for count in range(1, 7)),
    f":(?::{_GROUP}){{1,7}}",
    f"(?:{_GROUP}:){{1,7}}:",
    "::",
))  # fmt: skip
_URI_CHARACTER = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@/-]|%[0-9a-fA-F]{2})"
_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)",
    "email": f"{_ATOM}(?:\\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": f"{_OCTET}(?:\\.{_OCTET}){{3}}",
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": f"[a-zA-Z][a-zA-Z0-9+.-]*:(?://{_HOST}(?::[0-9]{{1,5}})?(?:/{_URI_CHARACTER}*)?|{_URI_CHARACTER}+)"
    f"(?:\\?(?:{_URI_CHARACTER}|\\?)*)?(?:#(?:{_URI_CHARACTER}|\\?)*)?",
}


@functools.cache
def text_format(name: str) -> Node | None:
    """Return the texts of a format, or None for one that says nothing here: a format may be a mere note."""
    return found_in(f"^(?:{_PATTERNS[name]})$") if name in _PATTERNS else None
