"""Finds what a person meant to write. Used by flags, YAML keys and commands alike."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, right: Iterable[str]) -> str:
    """`; did you mean …?` with the right name that is spelled most like this one, or nothing."""
    close = difflib.get_close_matches(name, sorted(right), n=1)
    return f"; did you mean {close[0]}?" if close else ""
