"""Reads settings whose value is a mapping, or the JSON of one on the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ConfigError


def read_mapping(value: object, place: str, example: str) -> Mapping[Any, object]:
    """Return a mapping or the one in its JSON, empty for null. Raises `ConfigError`, which names `place`."""
    example = f"write it like '{example}'"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place} is not valid JSON: {error}; {example}") from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place} must be a mapping, got {value!r}; {example}")
    return value
