"""Reads the fields of a model's files by type and range, so that a damaged file is told by file, field and value.

Owns what is sensible for a model's numbers, whichever file they come from. Knows no model and no format.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError

_SHOWN = 80


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`; `least` itself is out where it is `open`."""

    least: float
    most: float
    open: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.least < value if self.open else self.least <= value) and value <= self.most

    def __str__(self) -> str:
        return f"{'(' if self.open else '['}{self.least:.12g}, {self.most:.12g}]"


TOKEN_ID = Range(0, 2**31 - 1)
LAYERS = Range(1, 4096)
HEADS = Range(1, 65_536)
HEAD_DIM = Range(2, 16_384)
WIDTH = Range(1, 2**24)
CONTEXT = Range(1, 2**30)
NORM_EPSILON = Range(0, 1, open=True)
ROPE_THETA = Range(1, 1e15, open=True)
STRETCH = Range(1, 1e6)
POSITIVE = Range(0, 1e6, open=True)
WEIGHT = Range(0, 1e6)


class Fields:
    """The fields of one object of `where`, a file. A field that is null counts as missing; one that is missing has the
    caller's default, or is an error. All errors are `ConfigError`s."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def integer(self, name: str, allowed: Range, default: int | None = None) -> int:
        """A whole number; one that is written as 8.0 counts."""
        value = self._present(name, default, f"a whole number in {allowed}")
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or value not in allowed:
            raise self.wrong(name, f"a whole number in {allowed}")
        return int(value)

    def number(self, name: str, allowed: Range, default: float | None = None) -> float:
        """A number that is finite."""
        value = self._present(name, default, f"a number in {allowed}")
        if isinstance(value, bool) or not isinstance(value, int | float) or value not in allowed:
            raise self.wrong(name, f"a number in {allowed}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._present(name, default, "true or false")
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self._present(name, default, "a string")
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def texts(self, name: str) -> list[str] | None:
        """A list of strings, or None where there is none."""
        value = self.raw.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            raise self.wrong(name, "a list of strings")
        return value

    def numbers(self, name: str, allowed: Range) -> list[float]:
        """A list of numbers; empty where there is none."""
        value = self._present(name, [], "a list of numbers")
        if not isinstance(value, list | tuple):
            raise self.wrong(name, "a list of numbers")
        places = Fields({f"{name}[{i}]": each for i, each in enumerate(value)}, self.where)
        return [places.number(place, allowed) for place in places.raw]

    def object(self, name: str) -> Mapping[str, Any]:
        """An object, empty where there is none."""
        value = self._present(name, {}, "an object")
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return value

    def token_ids(self, name: str) -> list[int]:
        """A token id or a list of them; empty where there is none."""
        value = self.raw.get(name)
        if not isinstance(value, list):
            return [] if value is None else [self.integer(name, TOKEN_ID)]
        places = Fields({f"{name}[{i}]": each for i, each in enumerate(value)}, self.where)
        return [places.integer(place, TOKEN_ID) for place in places.raw]

    def wrong(self, name: str, allowed: str) -> ConfigError:
        """The error for a field that isn't what is `allowed`."""
        value = self.raw.get(name)
        if value is None:
            return ConfigError(f"{self.where}: {name} is missing; it should be {allowed}")
        return ConfigError(f"{self.where}: {name} should be {allowed}, it is {shown(value)}")

    def _present(self, name: str, default: Any, allowed: str) -> Any:
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise self.wrong(name, allowed)
        return value


def shown(value: Any) -> str:
    """A value for an error message, however large it is."""
    if isinstance(value, str):
        value = value[: 2 * _SHOWN]
    if isinstance(value, list | dict):
        kind = "list" if isinstance(value, list) else "object"
        return f"{'a' if kind == 'list' else 'an'} {kind} of {len(value)}"
    if isinstance(value, int) and abs(value) > 10**_SHOWN:
        return f"a number of more than {_SHOWN} digits"
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object. Raises `ConfigError`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} can't be read as JSON: it is nested too deep") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} should hold a JSON object, it holds a {type(content).__name__}")
    return content
