"""Builds the two configuration structs from flags, a YAML file, or arguments of `LLM`.

Flags override YAML, and YAML overrides the defaults. This module records where each value came from, and makes the
notes about other engines' names. The schema checks ranges, and `other_engines` defines what a foreign name means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from jaxserve.config.foreign_readers import READERS
from jaxserve.config.mappings import read_mapping
from jaxserve.config.nearest import nearest
from jaxserve.config.other_engines import foreign_flags
from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.config.settings import Setting, as_key, settings
from jaxserve.errors import ConfigError

Source = Literal["default", "yaml", "flag", "argument"]

# The name of SGLang's under which a method of speculation is written.
_SGLANG_METHOD = "speculative_algorithm"
# How `other_engines.tsv` begins what a flag sets, if it isn't a setting.
_SAME, _READ = "same ", "read "


@dataclasses.dataclass(frozen=True)
class GivenSetting:
    """One setting as a person wrote it. `place` is where: `--max-num-seqs`, `cpu.yaml:4: max_num_seqs`.

    The value of a flag is text, a list of texts, or a bool, or of any type in a mapping; values from YAML and arguments
    have their own type.
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
    set_implied_method(found, notes)
    check_same(found)
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
    """Return the values of one source by the name of the setting.

    A value that another setting must have already, as `other_engines.tsv` says, is under `same NAME`.
    If a flag is repeated under one name, the last counts; different values under two names are an error.
    """
    last: dict[str, GivenSetting] = {}
    for given in givens:
        if given.source == "yaml" and given.key in last:
            raise ConfigError(f"{given.place} is a duplicate of {last[given.key].place}; keep one")
        last[given.key] = given
    found: dict[str, SettingValue] = {}
    for given in last.values():
        for name, value in settings_of(given, notes):
            other = found.get(name)
            if other is not None and isinstance(other.value, dict) and isinstance(value.value, dict):
                value = dataclasses.replace(value, value={**other.value, **value.value})
            elif other is not None and other.value != value.value:
                raise ConfigError(
                    f"{value.place} and {other.place} both set {value.setting.name}, to {value.value!r} and "
                    f"{other.value!r}; keep one"
                )
            found[name] = value
    return found


def set_implied_method(found: dict[str, SettingValue], notes: list[str]) -> None:
    """Set the method of speculation that `speculative_model` implies if none is given, as vLLM does.

    Without a draft model, SGLang's EAGLE drafts with the model's own layers.
    """
    model, method = found.get("speculative_model"), found.get("speculative_method")
    if model is None or model.value is None:
        if method is not None and method.alias == _SGLANG_METHOD and method.value == "eagle":
            notes.append(f"{method.place} {method.value}: sets speculative_method=mtp, as there is no draft model")
            found["speculative_method"] = dataclasses.replace(method, value="mtp")
        return
    no_model = model.value in ("ngram", "[ngram]")
    if method is None:
        implied = "ngram" if no_model else "draft"
        notes.append(f"{model.place} {model.value}: sets speculative_method={implied}")
        method = dataclasses.replace(model, setting=settings()["speculative_method"], value=implied)
        found["speculative_method"] = method
    if no_model and method.value == "ngram":
        del found["speculative_model"]


def check_same(found: dict[str, SettingValue]) -> None:
    """Take out the values under `same NAME`. Raise `ConfigError` if one isn't that of its setting."""
    for name in [name for name in found if name.startswith(_SAME)]:
        given, to = found.pop(name), name.removeprefix(_SAME)
        ours = found[to].value if to in found else given.setting.default
        if given.value != ours:
            why = foreign_flags()[given.alias or to].meaning.reason
            raise ConfigError(f"{given.place} must be {to}={ours}, got {given.value}: {why}")


def settings_of(given: GivenSetting, notes: list[str], alias: str | None = None) -> Iterator[tuple[str, SettingValue]]:
    """Yield the settings that `given` sets, by name; none if its effect always holds. Raise `ConfigError`.

    `alias` is another engine's name under which it was written.
    """
    key, value, source, place = given.key, given.value, given.source, given.place
    flag = foreign_flags().get(key)
    if flag is None or key == "config":  # --config is read before the settings
        yield key, SettingValue(_known(given), _converted(_known(given), given), source, place, alias)
        return
    meaning = flag.with_value(value, place)
    if meaning is None:
        return
    if meaning.answer in ("refused", "left out"):
        raise ConfigError(f"{_with_value(given)} is refused: {meaning.reason}")
    if meaning.answer in ("in force", "by design"):
        notes.append(f"{_with_value(given)}: {meaning.reason}")
    elif fixed := meaning.values:
        if key not in settings():
            notes.append(f"{_with_value(given)}: sets {', '.join(f'{name}={it}' for name, it in fixed.items())}")
        for name, it in fixed.items():
            yield name, SettingValue(settings()[name], it, source, place, alias or (None if name == key else key))
    elif meaning.sets == "":
        for name, it in read_mapping(value, place, '{"key": "value"}').items():
            part = f"{flag.key}.{name}"
            if part not in foreign_flags():
                keys = [each.split(".")[1] for each in foreign_flags() if each.startswith(f"{flag.key}.")]
                raise ConfigError(f"{place}: {name} is not a known key{nearest(str(name), keys)}")
            if it is not None:
                yield from settings_of(GivenSetting(part, it, source, f"{place}: {name}"), notes)
    elif meaning.sets.startswith(_READ):
        for name, it in READERS[meaning.sets.removeprefix(_READ)](value, place).items():
            yield name, SettingValue(settings()[name], it, source, place, key)
    elif meaning.sets.startswith(_SAME):
        setting = settings()[meaning.sets.removeprefix(_SAME)]
        yield meaning.sets, SettingValue(setting, _converted(setting, given), source, place, key)
    elif meaning.sets == key:
        yield key, SettingValue(settings()[key], _converted(settings()[key], given), source, place, alias)
    else:
        yield from settings_of(dataclasses.replace(given, key=meaning.sets), notes, alias or key)


def _known(given: GivenSetting) -> Setting:
    setting = settings().get(given.key)
    if setting is None:
        hint = nearest(given.key, {*settings(), *foreign_flags()}) or "; `jaxserve config explain` lists all settings"
        raise ConfigError(f"{given.place} is not a known setting{hint}")
    return setting


def _converted(setting: Setting, given: GivenSetting) -> object:
    value = given.value
    if setting.choices and str(value).lower() in setting.choices:
        return str(value).lower()
    if given.source == "flag" and (isinstance(value, str) or (isinstance(value, list) and _are_texts(value))):
        return setting.parse([value] if setting.is_list and isinstance(value, str) else value, given.place)
    return setting.convert([value] if setting.is_list and isinstance(value, int) else value, given.place)


def _are_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _with_value(given: GivenSetting) -> str:
    if given.source == "flag":
        text = " ".join(map(str, given.value)) if isinstance(given.value, list) else given.value
        return given.place if isinstance(given.value, bool) else f"{given.place} {text}"
    return f"{given.place}={given.value}"


def _line(path: Path, key: yaml.Node) -> str:
    return f"{path}:{key.start_mark.line + 1}: {key.value}"


def from_arguments(arguments: Sequence[tuple[str, object]]) -> LoadedConfig:
    """Build the configuration from keyword arguments of `LLM`, ours or another engine's. Raise `ConfigError`."""
    return load_config(GivenSetting(as_key(name), value, "argument", name) for name, value in arguments)
