"""The schema read as a list: one `Setting` for each field of the configuration structs.

Flags, YAML keys, help texts and the README's tables all come from here, so there is no second list to keep in step.
What a value means, and whether it is in range, is the schema's business.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from jaxserve.config.schema import EngineConfig, ServerConfig
from jaxserve.errors import ConfigError

Config = EngineConfig | ServerConfig


@dataclasses.dataclass(frozen=True)
class Setting:
    """One thing a person can set. `kind` is its type without None; None means "chosen at start-up"."""

    name: str
    owner: type[Config]
    kind: Any
    optional: bool
    default: object
    description: str

    @property
    def flag(self) -> str:
        """The flag that sets it."""
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
    def choices(self) -> tuple[str, ...]:
        """The values it may take, where these are few."""
        return typing.get_args(self.kind) if typing.get_origin(self.kind) is Literal else ()

    @property
    def expects(self) -> str:
        """What a value must be, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.is_list:
            return "a list of whole numbers"
        return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[self.kind]

    def convert(self, value: object, place: str) -> object:
        """The value in the field's own type; `place` is what a person wrote it as. Raises `ConfigError`."""
        if value is None and self.optional:
            return None
        return self._convert(value, place, strict=True)

    def parse(self, text: str | list[str], place: str) -> object:
        """The value of a flag, from its text. Raises `ConfigError`."""
        if isinstance(text, list):
            parts = [part for item in text for part in item.split(",") if part]
            return self._convert(parts, place, strict=False)
        return self._convert(text, place, strict=False)

    def _convert(self, value: object, place: str, *, strict: bool) -> object:
        try:
            converted: object = msgspec.convert(value, self.kind, strict=strict)
        except msgspec.ValidationError:
            raise ConfigError(f"{place} must be {self.expects}, got {_shown(value)}") from None
        if isinstance(converted, float) and not math.isfinite(converted):
            raise ConfigError(f"{place} must be a finite number, got {converted}")
        return converted


@functools.cache
def settings() -> Mapping[str, Setting]:
    """Every setting by name, in the schema's order."""
    return types.MappingProxyType(
        {
            field.name: _setting(owner, field)
            for owner in (EngineConfig, ServerConfig)
            for field in msgspec.structs.fields(owner)
        }
    )


def as_flag(name: str) -> str:
    """`max_queued_requests` as `--max-queued-requests`, `q` as `-q`."""
    return ("--" if len(name) > 1 else "-") + name.replace("_", "-")


def as_key(name: str) -> str:
    """A flag or YAML key, hyphens or underscores, as the name of a field."""
    return name.lstrip("-").replace("-", "_")


def _setting(owner: type[Config], field: msgspec.structs.FieldInfo) -> Setting:
    annotated, (meta, *_) = field.type.__origin__, field.type.__metadata__
    members = typing.get_args(annotated) if isinstance(annotated, types.UnionType) else (annotated,)
    kinds = [member for member in members if member is not types.NoneType]
    assert len(kinds) == 1, f"{field.name}: a setting has one type, or None"
    assert isinstance(meta, msgspec.Meta), field.name
    assert meta.description, f"{field.name} has no description"
    return Setting(field.name, owner, kinds[0], len(members) > 1, field.default, meta.description)


def _shown(value: object) -> str:
    return ",".join(value) if isinstance(value, list) and all(isinstance(v, str) for v in value) else repr(value)
