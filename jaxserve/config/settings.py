"""The schema as a list: one `Setting` for each field of the configuration structs.

Flags, YAML keys, help texts and the tables in docs/reference are all made from this list. The schema itself defines the
meaning and the range of values.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from jaxserve.config.kv_events import KvEventsConfig
from jaxserve.config.mappings import read_mapping
from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.errors import ConfigError

Config = EngineConfig | ServerConfig
_SHORT_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])(i?)")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting. `kind` is its type without None; if `optional`, None means "chosen at start-up"."""

    name: str
    owner: type[Config]
    kind: Any
    optional: bool
    default: object
    description: str

    @property
    def flag(self) -> str:
        """The flag that sets it, such as `--page-size`."""
        return as_flag(self.name)

    @property
    def is_switch(self) -> bool:
        """Whether it is set by `--flag` and `--no-flag`."""
        return self.kind is bool

    @property
    def is_list(self) -> bool:
        """Whether its flag takes several values."""
        return typing.get_origin(self.kind) is tuple

    @property
    def is_mapping(self) -> bool:
        """Whether its flag takes JSON, and it is a mapping in YAML."""
        return typing.get_origin(self.kind) is dict

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values, if they are a fixed list."""
        return typing.get_args(self.kind) if typing.get_origin(self.kind) is Literal else ()

    @property
    def expects(self) -> str:
        """A description of valid values for error messages."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.is_list:
            return "a list of texts" if str in typing.get_args(self.kind) else "a list of whole numbers"
        return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[self.kind]

    def convert(self, value: object, place: str) -> object:
        """Convert a value to the field's type; `place` is where it was written. Raise `ConfigError`."""
        if value is None and self.optional:
            return None
        return self._convert(value, place, strict=True)

    def parse(self, text: str | list[str], place: str) -> object:
        """Convert the text of a flag to the field's type. Raise `ConfigError`.

        A list may have spaces or commas between its values, or be JSON as in vLLM. A whole number may end with k, m, g
        or t for thousands, millions and so on, or K, M, G or T (or Ki and so on) for powers of 1024, as in
        vLLM.
        """
        if isinstance(text, list):
            parts = [part.strip(" \"'") for item in text for part in item.strip().strip("[]").split(",")]
            return self._convert([part for part in parts if part], place, strict=False)
        if self.kind is int and (short := _SHORT_NUMBER.fullmatch(text)):
            base = 1000 if short[2].islower() and not short[3] else 1024
            return int(float(short[1]) * base ** ("kmgt".index(short[2].lower()) + 1))
        return self._convert(text, place, strict=False)

    def _convert(self, value: object, place: str, *, strict: bool) -> object:
        if self.kind is KvEventsConfig:
            return KvEventsConfig.read(value, place)
        if self.is_mapping:
            return dict(read_mapping(value, place, '{"num_labels": 1}'))
        try:
            converted: object = msgspec.convert(value, self.kind, strict=strict)
        except msgspec.ValidationError:
            raise ConfigError(f"{place} must be {self.expects}, got {_quoted(value)}") from None
        if isinstance(converted, float) and not math.isfinite(converted):
            raise ConfigError(f"{place} must be a finite number, got {converted}")
        return converted


@functools.cache
def settings() -> Mapping[str, Setting]:
    """Return every setting by name, in the schema's order."""
    return types.MappingProxyType(
        {
            field.name: _setting(owner, field)
            for owner in (EngineConfig, ServerConfig)
            for field in msgspec.structs.fields(owner)
        }
    )


def as_flag(name: str) -> str:
    """Return the flag for a name: `--max-queued-requests` for `max_queued_requests`, `-q` for `q`."""
    return ("--" if len(name) > 1 else "-") + name.replace("_", "-")


def as_key(name: str) -> str:
    """Return the field name for a flag or YAML key, with hyphens or underscores."""
    return name.lstrip("-").replace("-", "_")


def _setting(owner: type[Config], field: msgspec.structs.FieldInfo) -> Setting:
    annotated, (meta, *_) = field.type.__origin__, field.type.__metadata__
    is_union = typing.get_origin(annotated) in (types.UnionType, typing.Union)
    members = typing.get_args(annotated) if is_union else (annotated,)
    kinds = [member for member in members if member is not types.NoneType]
    assert len(kinds) == 1, f"{field.name}: a setting has one type, or None"
    assert isinstance(meta, msgspec.Meta), field.name
    assert meta.description, f"{field.name} has no description"
    return Setting(field.name, owner, kinds[0], len(members) > 1, field.default, meta.description)


def _quoted(value: object) -> str:
    return ",".join(value) if isinstance(value, list) and all(isinstance(v, str) for v in value) else repr(value)
