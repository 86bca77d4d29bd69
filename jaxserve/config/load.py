"""Builds the two configuration structs from flags, a YAML file, or arguments of `LLM`.

Flags override YAML, and YAML overrides the defaults. This module records where each value came from, and makes the
notes about other engines' names. The schema checks ranges, and `aliases` defines what a foreign name means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import yaml

from jaxserve.config import aliases
from jaxserve.config.nearest import nearest
from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.config.settings import Setting, as_key, settings
from jaxserve.errors import ConfigError

Source = Literal["default", "yaml", "flag", "argument"]


@dataclasses.dataclass(frozen=True)
class GivenSetting:
    """One setting as a person wrote it. `place` is where: `--max-num-seqs`, `cpu.yaml:4: max_num_seqs`.

    The value of a flag is text, a list of texts, or a bool; values from YAML and arguments have their own type.
    """

    key: str
    value: object
    source: Source
    place: str


@dataclasses.dataclass(frozen=True)
class SettingValue:
    """The value of a setting and its origin. `alias` is the other engine's name it was written under, if any."""

    setting: Setting
    value: object
    source: Source = "default"
    place: str = ""
    alias: str | None = None


@dataclasses.dataclass(frozen=True)
class LoadedConfig:
    """A whole configuration: the structs, every setting with its origin, and notes to log."""

    engine: EngineConfig
    server: ServerConfig
    values: tuple[SettingValue, ...]
    notes: tuple[str, ...]


def load_config(flags: Iterable[GivenSetting] = (), config_file: Path | None = None) -> LoadedConfig:
    """Build the configuration from flags and a YAML file. Raise `ConfigError`."""
    notes: list[str] = []
    found = _by_setting(read_yaml(config_file), notes) if config_file is not None else {}
    found |= _by_setting(flags, notes)
    _set_implied_method(found, notes)
    _check_same(found)
    values = tuple(found.get(name, SettingValue(setting, setting.default)) for name, setting in settings().items())
    engine = EngineConfig(**{v.setting.name: v.value for v in values if v.setting.owner is EngineConfig})  # type: ignore[arg-type]
    server = ServerConfig(**{v.setting.name: v.value for v in values if v.setting.owner is ServerConfig})  # type: ignore[arg-type]
    return LoadedConfig(engine, server, values, tuple(notes))


def read_yaml(path: Path) -> list[GivenSetting]:
    """Read the keys of a YAML file, with the line of each. Raise `ConfigError` if it isn't a flat mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path} must have one key and value per line, such as 'page_size: 16'")
        return [
            GivenSetting(as_key(str(key.value)), _value_of(loader, node, _line(path, key)), "yaml", _line(path, key))
            for key, node in root.value
        ]
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply") from None
    finally:
        loader.dispose()


def _value_of(loader: yaml.SafeLoader, node: yaml.Node, place: str) -> object:
    try:
        return loader.construct_object(node, deep=True)
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, or an invalid date
        raise ConfigError(f"{place} can't be read: {error}") from None


def _by_setting(givens: Iterable[GivenSetting], notes: list[str]) -> dict[str, SettingValue]:
    """Return the values of one source by the setting's name.

    If a flag is repeated under one name, the last counts; different values under two names are an error.
    """
    last: dict[str, GivenSetting] = {}
    for given in givens:
        if given.source == "yaml" and given.key in last:
            raise ConfigError(f"{given.place} is a duplicate of {last[given.key].place}; keep one")
        last[given.key] = given
    found: dict[str, SettingValue] = {}
    for given in (part for whole in last.values() for part in _parts(whole)):
        value = _value(given, notes)
        if value is None:
            continue
        name = given.key if given.key in _SAME else value.setting.name
        other = found.get(name)
        if other is not None and other.value != value.value:
            raise ConfigError(
                f"{given.place} and {other.place} both set {name}, to {value.value!r} and {other.value!r}; keep one"
            )
        found[name] = value
    return found


def _parts(given: GivenSetting) -> list[GivenSetting]:
    """Return the settings that the value of `given` holds, or else `given` alone. Raise `ConfigError`."""
    alias = aliases.ALIASES.get(given.key)
    if not isinstance(alias, aliases.ReadAlias):
        return [given]
    parts = alias.read(given.value, given.place)
    return [GivenSetting(key, value, given.source, f"{given.place}: {key}") for key, value in parts.items()]


def _set_implied_method(found: dict[str, SettingValue], notes: list[str]) -> None:
    """Set the method of speculation that `speculative_model` implies if none is given, as vLLM does."""
    model = found.get("speculative_model")
    if model is None or model.value is None:
        return
    no_model = model.value in ("ngram", "[ngram]")
    if "speculative_method" not in found:
        method = "ngram" if no_model else "draft"
        notes.append(f"{model.place} {model.value}: sets speculative_method={method}")
        found["speculative_method"] = dataclasses.replace(model, setting=settings()["speculative_method"], value=method)
    if no_model and found["speculative_method"].value == "ngram":
        del found["speculative_model"]


_SAME = {name: alias for name, alias in aliases.ALIASES.items() if isinstance(alias, aliases.SameAlias)}


def _check_same(found: dict[str, SettingValue]) -> None:
    for name, alias in _SAME.items():
        if name in found:
            given = found.pop(name)
            ours = found[alias.to].value if alias.to in found else given.setting.default
            if given.value != ours:
                raise ConfigError(f"{given.place} must be {alias.to}={ours}, got {given.value}: {alias.why}")


def _value(given: GivenSetting, notes: list[str]) -> SettingValue | None:
    """Return the value that `given` sets, or None if its effect always holds. Raise `ConfigError`."""
    alias = aliases.ALIASES.get(given.key)
    if alias is None:
        setting = settings().get(given.key)
        if setting is None:
            renames = (name for name, alias in aliases.ALIASES.items() if isinstance(alias, aliases.RenameAlias))
            hint = nearest(given.key, {*settings(), *renames}) or "; `jaxserve config explain` lists all settings"
            raise ConfigError(f"{given.place} is not a known setting{hint}")
        return SettingValue(setting, _converted(setting, given), given.source, given.place)
    if isinstance(alias, aliases.RenameAlias | aliases.SameAlias):
        setting = settings()[alias.to]
        return SettingValue(setting, _converted(setting, given), given.source, given.place, given.key)
    assert not isinstance(alias, aliases.ReadAlias), f"{given.place}: its parts are read first"
    match aliases.outcome(alias, given.value, given.place):
        case aliases.RefusedName(why):
            raise ConfigError(f"{_with_value(given)} is refused: {why}")
        case aliases.InForce(why):
            notes.append(f"{_with_value(given)}: {why}")
            return None
        case aliases.Sets(key, value):
            notes.append(f"{_with_value(given)}: sets {key}={value}")
            return SettingValue(settings()[key], value, given.source, given.place, given.key)


def _converted(setting: Setting, given: GivenSetting) -> object:
    counterpart = aliases.COUNTERPARTS.get(setting.name, {}).get(str(given.value).lower())
    if counterpart is not None:
        raise ConfigError(f"{_with_value(given)} is refused: {counterpart}")
    same = aliases.SYNONYMS.get(setting.name, {}).get(str(given.value).lower())
    if same is not None:
        return same
    if given.source == "flag" and (isinstance(given.value, str) or setting.is_list):
        assert isinstance(given.value, str | list)
        return setting.parse(given.value, given.place)
    return setting.convert(given.value, given.place)


def _with_value(given: GivenSetting) -> str:
    if given.source == "flag":
        return given.place if isinstance(given.value, bool) else f"{given.place} {given.value}"
    return f"{given.place}={given.value}"


def _line(path: Path, key: yaml.Node) -> str:
    return f"{path}:{key.start_mark.line + 1}: {key.value}"


def from_arguments(arguments: Sequence[tuple[str, object]]) -> LoadedConfig:
    """Build the configuration from keyword arguments of `LLM`, ours or another engine's. Raise `ConfigError`."""
    return load_config(GivenSetting(as_key(name), value, "argument", name) for name, value in arguments)
