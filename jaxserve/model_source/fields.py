"""Reads the fields of a model's files by type and range; errors name the file, the field and its value.

Owns the valid ranges of a model's numbers, for every file format. Knows no model and no format.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError

_MAX_SHOWN = 80


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`, without `least` itself if the range is `open`."""

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
EXPERTS = Range(1, 4096)
CONTEXT = Range(1, 2**30)
# float32 computes with these numbers: smaller ones would be 0 there, or make infinity
NORM_EPSILON = Range(1e-30, 1)
ROPE_THETA = Range(1, 1e15, open=True)
ROPE_FACTOR = Range(1, 1e6)
POSITIVE = Range(1e-6, 1e6)
NON_NEGATIVE = Range(0, 1e6)


class Fields:
    """The fields of a JSON object, or of one like it, from the file `where`.

    A field that is null counts as missing. A missing field has the caller's default; without a default it is an error.
    All errors are `ConfigError`s. `read` holds the names that were asked for.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field of any type."""
        self.read.add(name)
        value = self.raw.get(name)
        return default if value is None else value

    def integer(self, name: str, allowed: Range, default: int | None = None) -> int:
        """Return a whole number; 8.0 counts as one."""
        value = self._present(name, default, f"a whole number in {allowed}")
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or value not in allowed:
            raise self.error(name, f"a whole number in {allowed}")
        return int(value)

    def number(self, name: str, allowed: Range, default: float | None = None) -> float:
        """Return a finite number as a float."""
        value = self._present(name, default, f"a number in {allowed}")
        if isinstance(value, bool) or not isinstance(value, int | float) or value not in allowed:
            raise self.error(name, f"a number in {allowed}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._present(name, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """Return a string."""
        value = self._present(name, default, "a string")
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def texts(self, name: str) -> list[str] | None:
        """Return a list of strings, or None if the field is missing."""
        value = self.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            raise self.error(name, "a list of strings")
        return value

    def numbers(self, name: str, allowed: Range) -> list[float]:
        """Return a list of numbers; empty if the field is missing."""
        value = self._present(name, [], "a list of numbers")
        if not isinstance(value, list | tuple):
            raise self.error(name, "a list of numbers")
        items = Fields({f"{name}[{i}]": each for i, each in enumerate(value)}, self.where)
        return [items.number(item, allowed) for item in items.raw]

    def object(self, name: str) -> Mapping[str, Any]:
        """Return an object; empty if the field is missing."""
        value = self._present(name, {}, "an object")
        if not isinstance(value, Mapping):
            raise self.error(name, "an object")
        return value

    def token_ids(self, name: str) -> list[int]:
        """Return a token id or a list of them as a list; empty if the field is missing."""
        value = self.raw.get(name)
        if not isinstance(value, list):
            return [] if value is None else [self.integer(name, TOKEN_ID)]
        items = Fields({f"{name}[{i}]": each for i, each in enumerate(value)}, self.where)
        return [items.integer(item, TOKEN_ID) for item in items.raw]

    def renamed(self, names: Mapping[str, str], **defaults: Any) -> Fields:
        """Return the fields under the names that `names` maps theirs to, and defaults. Fields read there are read here,
        and those with another name there count as read."""
        raw = {names.get(name, name): value for name, value in self.raw.items() if value is not None}
        found = Fields(defaults | raw, self.where)
        self.read.update(names)
        found.read = self.read
        return found

    def error(self, name: str, allowed: str) -> ConfigError:
        """Return the error for a field whose value isn't one that is `allowed`."""
        value = self.raw.get(name)
        if value is None:
            return ConfigError(f"{self.where}: {name} is missing; it should be {allowed}")
        return ConfigError(f"{self.where}: {name} should be {allowed}, it is {abbreviate(value)}")

    def _present(self, name: str, default: Any, allowed: str) -> Any:
        value = self.get(name, default)
        if value is None:
            raise self.error(name, allowed)
        return value


def abbreviate(value: Any) -> str:
    """Return a value as an error message shows it, shortened if it is large."""
    if isinstance(value, str):
        value = value[: 2 * _MAX_SHOWN]
    if isinstance(value, list | dict):
        kind = "list" if isinstance(value, list) else "object"
        return f"{'a' if kind == 'list' else 'an'} {kind} of {len(value)}"
    if isinstance(value, int) and abs(value) > 10**_MAX_SHOWN:
        return f"a number of more than {_MAX_SHOWN} digits"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds. Raise `ConfigError` if it can't be read as one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} can't be read as JSON: it is nested too deep") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} should hold a JSON object, it holds a {type(content).__name__}")
    return content
