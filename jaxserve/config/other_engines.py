"""The flags of other engines, and what each means here. The table is data: `other_engines.tsv`.

A foreign flag is taken (it sets settings of ours, with the same meaning), is in force (its effect always holds here),
is by design (it chooses among kernels or graphs, which changes no answer, limit or memory, and is chosen otherwise
here), or is refused with a reason. One is left out if nothing that runs here could use it, such as the flags of other
platforms; it is refused, too. No name is accepted that would change answers, limits or memory and is then ignored.

Columns of the table, by tabs; keys are the flags with underscores:

- engine: vllm, sglang, both, or older (names of earlier releases)
- flags: one flag with its other names, separated by commas; `--config.key` is a key of the mapping `--config`
- value: `one` value, a `list`, a `mapping`, or a `switch`; or the values, separated by commas, to which this line
  applies instead, `off` for `--no-` and false
- answer: taken, in force, by design, refused, left out
- sets: of what is taken: the setting of ours with this value, or `setting=value; …`, or `same setting`, which must
  have this value already, or `read reader`; nothing for a mapping, whose keys have lines of their own
- neutral: values with which a flag that is refused asks for nothing
- reason
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import types
from collections.abc import Mapping
from importlib import resources
from typing import Literal, cast, get_args

import yaml

from jaxserve.errors import ConfigError

Answer = Literal["taken", "in force", "by design", "refused", "left out"]
Kind = Literal["one", "list", "mapping", "switch"]


@dataclasses.dataclass(frozen=True)
class Meaning:
    """What a flag means with some value. `sets` and `reason` are as in the table."""

    answer: Answer
    sets: str
    reason: str

    @property
    def values(self) -> Mapping[str, object]:
        """The settings with the values that it gives them, if they are fixed."""
        if "=" not in self.sets:
            return {}
        pairs = (pair.split("=", 1) for pair in self.sets.split(";"))
        return {name.strip(): yaml.safe_load(value) for name, value in pairs}


@dataclasses.dataclass(frozen=True)
class ForeignFlag:
    """A flag of another engine. `known` are the meanings of some values, in lower case; `meaning` is that of others.

    `meaning` is None if the flag is ours, too, and only some of its values need a meaning.
    """

    key: str
    names: tuple[str, ...]
    engine: str
    kind: Kind
    meaning: Meaning
    neutral: frozenset[str]
    known: Mapping[str, Meaning]

    def with_value(self, value: object, place: str) -> Meaning | None:
        """Return the meaning of a value, or None if it asks for nothing. Raises `ConfigError` for a wrong type."""
        if value is None and self.meaning.answer != "taken":
            return None
        if self.kind == "switch" and not isinstance(value, bool):
            raise ConfigError(f"{place} must be true or false, got {value!r}")
        text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        written = "off" if value is False else text.strip().lower()
        if written in self.known:
            return self.known[written]
        is_refused = self.meaning.answer in ("refused", "left out")
        if is_refused and (written in self.neutral or value is False):
            return None
        return self._off() if self.kind == "switch" and value is False else self.meaning

    def _off(self) -> Meaning:
        """Return the meaning of `--no-` for a switch that has no line for it."""
        if self.meaning.answer == "in force":
            return Meaning("refused", "", f"{self.meaning.reason}; leave the flag out")
        opposite = "; ".join(f"{name}={str(not value).lower()}" for name, value in self.meaning.values.items())
        return dataclasses.replace(self.meaning, sets=opposite) if opposite else self.meaning


@functools.cache
def foreign_flags() -> Mapping[str, ForeignFlag]:
    """Return the table by every name of every flag, as a key."""
    known: dict[str, dict[str, Meaning]] = {}
    main: dict[str, tuple[list[str], Kind]] = {}
    for line in _lines("other_engines.tsv"):
        _, flags, value, answer, sets, _, reason = line
        assert answer in get_args(Answer), line
        key = _key(flags.split(",")[0])
        if value in get_args(Kind):
            assert key not in main, f"{key} has two lines"
            main[key] = (line, cast(Kind, value))
        else:
            meaning = Meaning(cast(Answer, answer), sets, reason)
            known.setdefault(key, {}).update(dict.fromkeys(value.split(","), meaning))
    assert set(known) <= set(main), set(known) - set(main)
    found: dict[str, ForeignFlag] = {}
    for key, (line, kind) in main.items():
        engine, flags, _, answer, sets, neutral, reason = line
        meaning = Meaning(cast(Answer, answer), sets, reason)
        names = tuple(map(_key, flags.split(",")))
        made = ForeignFlag(
            key, names, engine, kind, meaning, frozenset(neutral.split(",")), types.MappingProxyType(known.get(key, {}))
        )
        assert not found.keys() & set(names), names
        found |= dict.fromkeys(names, made)
    return types.MappingProxyType(found)


@dataclasses.dataclass(frozen=True)
class ForeignVariable:
    """An environment variable of another engine, or a family of them if its name has a `*`. `sets` names settings of
    ours that get its value, or is `keep` if the variable means the same here."""

    name: str
    answer: Answer
    sets: str
    reason: str


@functools.cache
def environment_variables() -> tuple[ForeignVariable, ...]:
    """Return the environment variables of other engines, from `other_environments.tsv`; exact and long names first."""
    lines = _lines("other_environments.tsv")
    found = [ForeignVariable(name, cast(Answer, answer), sets, reason) for _, name, answer, sets, reason in lines]
    return tuple(sorted(found, key=lambda row: ("*" in row.name, -len(row.name))))


def renames(setting: str) -> list[str]:
    """Return the other engines' names of a setting, with any value."""
    return [
        name
        for name, flag in foreign_flags().items()
        if flag.meaning.sets == setting and name != setting and "." not in name
    ]


def _lines(file: str) -> list[list[str]]:
    text = resources.files("jaxserve.config").joinpath(file).read_text(encoding="utf-8")
    return list(csv.reader(text.splitlines()[1:], delimiter="\t", quoting=csv.QUOTE_NONE))


def _key(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")
