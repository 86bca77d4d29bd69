"""Says what every setting came to and why: the table and the JSON of `jaxserve config explain`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

from jaxserve.config.load import Loaded, Value
from jaxserve.config.schema import EngineConfig

_SECRET = frozenset({"api_key"})


def as_rows(loaded: Loaded) -> list[dict[str, Any]]:
    """One row a setting, in the schema's order, ready for JSON."""
    return [
        {
            "key": value.setting.name,
            "value": shown(value),
            "source": value.source,
            "place": value.place,
            "alias": value.alias,
            "part": "engine" if value.setting.owner is EngineConfig else "server",
            "description": value.setting.description,
        }
        for value in loaded.values
    ]


def as_text(loaded: Loaded, width: int = 100) -> Iterable[str]:
    """The same for a terminal: value and origin on one line, the description below, then the notes."""
    for value in loaded.values:
        yield f"{value.setting.name} = {_readable(value)}  [{_origin(value)}]"
        yield from textwrap.wrap(value.setting.description, width, initial_indent="    ", subsequent_indent="    ")
    if loaded.notes:
        yield ""
    yield from loaded.notes


def shown(value: Value) -> object:
    """The value as it may be printed: a secret is masked, a tuple is a list."""
    if value.setting.name in _SECRET and value.value is not None:
        return "***"
    return list(value.value) if isinstance(value.value, tuple) else value.value


def _readable(value: Value) -> str:
    plain = shown(value)
    if plain is None:
        return "not set"
    return str(plain).lower() if isinstance(plain, bool) else str(plain)


def _origin(value: Value) -> str:
    if value.source == "default":
        return "default"
    alias = f", alias {value.alias}" if value.alias else ""
    return f"{value.source} {value.place}{alias}"
