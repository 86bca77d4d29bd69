"""Formats the value and origin of every setting, as text and JSON, for `jaxserve config explain`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from typing import Any

import msgspec

from jaxserve.config.load import LoadedConfig, SettingValue
from jaxserve.config.schema import EngineConfig

_SECRET = frozenset({"api_key", "admin_api_key", "ssl_keyfile_password", "hf_token"})


def as_rows(loaded: LoadedConfig) -> list[dict[str, Any]]:
    """Return one row per setting, in the schema's order, ready for JSON."""
    return [
        {
            "key": value.setting.name,
            "value": printable_value(value),
            "source": value.source,
            "place": value.place,
            "alias": value.alias,
            "part": "engine" if value.setting.owner is EngineConfig else "server",
            "description": value.setting.description,
        }
        for value in loaded.values
    ]


def as_text(loaded: LoadedConfig, width: int = 100) -> Iterable[str]:
    """Yield lines for a terminal: value and origin of each setting, its description below, then the notes."""
    for value in loaded.values:
        yield f"{value.setting.name} = {_readable(value)}  [{_origin(value)}]"
        yield from textwrap.wrap(value.setting.description, width, initial_indent="    ", subsequent_indent="    ")
    if loaded.notes:
        yield ""
    yield from loaded.notes


def printable_value(value: SettingValue) -> object:
    """Return the value for printing: secrets masked, tuples as lists, structs as mappings."""
    if value.setting.name in _SECRET and value.value is not None:
        return "***"
    return list(value.value) if isinstance(value.value, tuple) else msgspec.to_builtins(value.value)


def _readable(value: SettingValue) -> str:
    plain = printable_value(value)
    if plain is None:
        return "not set"
    if isinstance(plain, dict):
        return json.dumps(plain)
    return str(plain).lower() if isinstance(plain, bool) else str(plain)


def _origin(value: SettingValue) -> str:
    if value.source == "default":
        return "default"
    alias = f", alias {value.alias}" if value.alias else ""
    return f"{value.source} {value.place}{alias}"
