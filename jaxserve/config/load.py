"""From what a person wrote (flags, a YAML file, arguments of `LLM`) to the two configuration structs, strictly.

Flags go over YAML, YAML over the defaults. It owns where each value came from and the notes about other engines'
names; it never decides whether a value is in range (the schema does) nor what a foreign name means (`aliases` does).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import yaml

from jaxserve.config import aliases
from jaxserve.config.nearest import nearest
from jaxserve.config.schema import EngineConfig, ServerConfig
from jaxserve.config.settings import Setting, as_key, settings
from jaxserve.errors import ConfigError

Source = Literal["default", "yaml", "flag", "argument"]


@dataclasses.dataclass(frozen=True)
class Given:
    """One value as a person wrote it: under which key, and where (`--max-num-seqs`, `cpu.yaml:4: max_num_seqs`).

    The value of a flag is text (or a list of texts), or a bool; that of YAML and of an argument has its own type.
    """

    key: str
    value: object
    source: Source
    place: str


@dataclasses.dataclass(frozen=True)
class Value:
    """What a setting came to, and from where. `alias` is the other engine's name it was written under, if any."""

    setting: Setting
    value: object
    source: Source = "default"
    place: str = ""
    alias: str | None = None


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A whole configuration: the structs, every setting with its origin, and what is to be said in the log."""

    engine: EngineConfig
    server: ServerConfig
    values: tuple[Value, ...]
    notes: tuple[str, ...]


def load(flags: Iterable[Given] = (), config_file: Path | None = None) -> tuple[EngineConfig, ServerConfig]:
    """The configuration that flags and a YAML file make. Raises `ConfigError`."""
    loaded = resolve(flags, config_file)
    return loaded.engine, loaded.server


def resolve(flags: Iterable[Given] = (), config_file: Path | None = None) -> Loaded:
    """`load`, with where every value came from. Raises `ConfigError`."""
    notes: list[str] = []
    found = _by_setting(read_yaml(config_file), notes) if config_file is not None else {}
    found |= _by_setting(flags, notes)
    values = tuple(found.get(name, Value(setting, setting.default)) for name, setting in settings().items())
    engine = EngineConfig(**{v.setting.name: v.value for v in values if v.setting.owner is EngineConfig})  # type: ignore[arg-type]
    server = ServerConfig(**{v.setting.name: v.value for v in values if v.setting.owner is ServerConfig})  # type: ignore[arg-type]
    return Loaded(engine, server, values, tuple(notes))


def read_yaml(path: Path) -> list[Given]:
    """The top level of a YAML file, key by key with its line. Raises `ConfigError` when it isn't a flat mapping."""
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
            raise ConfigError(f"{path} must hold keys and values, one a line, such as 'page_size: 16'")
        return [
            Given(as_key(str(key.value)), _value_of(loader, node, _line(path, key)), "yaml", _line(path, key))
            for key, node in root.value
        ]
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deep") from None
    finally:
        loader.dispose()


def _value_of(loader: yaml.SafeLoader, node: yaml.Node, place: str) -> object:
    try:
        return loader.construct_object(node, deep=True)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a date that is none
        raise ConfigError(f"{place} can't be read: {error}") from None


def _by_setting(givens: Iterable[Given], notes: list[str]) -> dict[str, Value]:
    """The values of one source by setting. A flag repeated under one name: the last holds; under two: an error."""
    last: dict[str, Given] = {}
    for given in givens:
        if given.source == "yaml" and given.key in last:
            raise ConfigError(f"{given.place} stands twice; the first is {last[given.key].place}")
        last[given.key] = given
    found: dict[str, Value] = {}
    for given in last.values():
        value = _value(given, notes)
        if value is None:
            continue
        other = found.get(value.setting.name)
        if other is not None and other.value != value.value:
            raise ConfigError(
                f"{given.place} and {other.place} both set {value.setting.name}, "
                f"to {value.value!r} and {other.value!r}; keep one"
            )
        found[value.setting.name] = value
    return found


def _value(given: Given, notes: list[str]) -> Value | None:
    """What one written value sets, or None where its promise holds already. Raises `ConfigError`."""
    alias = aliases.ALIASES.get(given.key)
    if alias is None:
        setting = settings().get(given.key)
        if setting is None:
            renames = (name for name, alias in aliases.ALIASES.items() if isinstance(alias, aliases.Rename))
            hint = nearest(given.key, {*settings(), *renames}) or "; `jaxserve config explain` lists them all"
            raise ConfigError(f"{given.place} is not a known setting{hint}")
        return Value(setting, _converted(setting, given), given.source, given.place)
    if isinstance(alias, aliases.Rename):
        setting = settings()[alias.to]
        return Value(setting, _converted(setting, given), given.source, given.place, given.key)
    match aliases.outcome(alias, given.value, given.place):
        case aliases.Refused(why):
            raise ConfigError(f"{_with_value(given)} is refused: {why}")
        case aliases.InForce(why):
            notes.append(f"{_with_value(given)}: {why}")
            return None
        case aliases.Sets(key, value):
            notes.append(f"{_with_value(given)}: sets {key}={value}")
            return Value(settings()[key], value, given.source, given.place, given.key)


def _converted(setting: Setting, given: Given) -> object:
    counterpart = aliases.COUNTERPARTS.get(setting.name, {}).get(str(given.value).lower())
    if counterpart is not None:
        raise ConfigError(f"{_with_value(given)} is refused: {counterpart}")
    if given.source == "flag" and not isinstance(given.value, bool):
        assert isinstance(given.value, str | list)
        return setting.parse(given.value, given.place)
    return setting.convert(given.value, given.place)


def _with_value(given: Given) -> str:
    if given.source == "flag":
        return given.place if isinstance(given.value, bool) else f"{given.place} {given.value}"
    return f"{given.place}={given.value}"


def _line(path: Path, key: yaml.Node) -> str:
    return f"{path}:{key.start_mark.line + 1}: {key.value}"


def from_arguments(arguments: Sequence[tuple[str, object]]) -> Loaded:
    """The configuration that keyword arguments make (`LLM`'s, ours or another engine's). Raises `ConfigError`."""
    return resolve(Given(as_key(name), value, "argument", name) for name, value in arguments)
