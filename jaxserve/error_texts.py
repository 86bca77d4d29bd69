"""Parts of error texts: lists that are cut off, and the differences between two descriptions of the same thing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def join_first(items: Sequence[str], limit: int, separator: str = ", ") -> str:
    """Join at most `limit` items, and say how many more there are."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more


def join_differences(theirs: Any, ours: Any, *, there: str, here: str) -> str:
    """Return the names and both values of the entries that differ between two mappings, at most four; empty if none do.
    `there` and `here` stand after the values. Nested mappings are compared entry by entry, by dotted names."""
    return join_first(_differences(theirs, ours, there, here), limit=4, separator="; ")


def _differences(theirs: Any, ours: Any, there: str, here: str, name: str = "") -> list[str]:
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        keys = [*ours, *(key for key in theirs if key not in ours)]
        return [
            text
            for key in keys
            for text in _differences(theirs.get(key), ours.get(key), there, here, f"{name}.{key}" if name else key)
        ]
    return [f"{name} is {theirs!r} {there} and {ours!r} {here}"] if theirs != ours else []
