"""Reads the arguments of another engine's server: yields the settings they give, and names arguments that give none."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from jaxserve.cli.common.plain_form import in_plain_form
from jaxserve.cli.translation.launch import Engine, Launch
from jaxserve.config.load import GivenSetting
from jaxserve.config.nearest import nearest
from jaxserve.config.other_engines import foreign_flags
from jaxserve.config.settings import as_flag, as_key, settings

_SHORT_NUMBER = re.compile(r"[\d.]+[KMGT]")
_OF_FILE = "its keys may be the other engine's names; a host, port or model that it doesn't have is jaxserve's default"
# Flags that take several values in vLLM and one here.
_SEVERAL = ("served_model_name", "api_key")


@dataclasses.dataclass(frozen=True)
class ChangedPart:
    """A part of the command that is changed, added or left out, and why."""

    written: str
    reason: str
    answer: Literal["note", "refused"]


def given_settings(launch: Launch, config: list[str], parts: list[ChangedPart]) -> Iterator[GivenSetting]:
    """Yield the settings of the arguments as they are written; add those of `--config` to `config`."""
    words, has_model = [word for word in in_plain_form(launch.arguments) if word], False
    first: str | None = None
    while words:
        word = words.pop(0)
        if not word.startswith("-") or _is_number(word):
            if has_model or word.lower() in ("true", "false"):
                parts.append(ChangedPart(word, "it belongs to no flag", "refused"))
            else:
                has_model, first = True, word
                yield GivenSetting("model", word, "flag", "MODEL")
            continue
        name, equals, value = word.partition("=")
        key = _completed(as_key(name), launch.engine)
        has_model |= key in ("model", "model_path")
        if key == "config" and (equals or words):
            path = value if equals else words.pop(0)
            config += ["--config", path]
            parts.append(ChangedPart(f"--config {path}", _OF_FILE, "note"))
            continue
        if key in ("model", "model_path") and first is not None and (equals or words):
            path = value if equals else words.pop(0)
            parts.append(ChangedPart(f"{name} {path}", f"the model is {first}, which comes first", "refused"))
            continue
        kind = _kind(key)
        if kind is None and _kind(key.removeprefix("no_")) == "switch":
            yield GivenSetting(key.removeprefix("no_"), False, "flag", name)
        elif kind == "switch" and value.lower() not in ("", "true", "false"):
            parts.append(ChangedPart(word, "it takes no value", "refused"))
        elif kind == "switch":
            yield GivenSetting(key, value.lower() != "false", "flag", name)
        elif equals:
            yield GivenSetting(key, [value] if kind == "list" else _decimal(value, launch.engine), "flag", name)
        else:
            count = _num_values(words)
            is_list = kind == "list" or (key in _SEVERAL and launch.engine == "vllm")
            taken = [words.pop(0) for _ in range(count if is_list else min(count, 1))]
            if kind is None:
                parts.append(
                    ChangedPart(" ".join([name, *taken]), f"it is not known{nearest(name, _names())}", "refused")
                )
            elif not taken:
                parts.append(ChangedPart(name, "it needs a value", "refused"))
            else:
                if kind != "list":
                    parts += [
                        ChangedPart(f"{name} {more}", f"one is taken: {taken[0]}", "refused") for more in taken[1:]
                    ]
                value = _decimal(taken[0], launch.engine)
                yield GivenSetting(key, taken if kind == "list" else value, "flag", name)


def _completed(key: str, engine: Engine) -> str:
    """Return the key that an abbreviated one stands for, as both engines take them, or the key itself."""
    if _kind(key) is not None:
        return key
    longer = {
        flag.key: name
        for name, flag in foreign_flags().items()
        if name.startswith(key) and "." not in name and flag.engine in (engine, "both")
    }
    return next(iter(longer.values())) if len(longer) == 1 else key


def _decimal(text: str, engine: Engine) -> str:
    """Return a number of SGLang's with a suffix, all of which are powers of 1000, as vLLM and jaxserve write it."""
    return text.lower() if engine == "sglang" and _SHORT_NUMBER.fullmatch(text) else text


def _num_values(words: Sequence[str]) -> int:
    """Return how many of the first words are no flags."""
    return next((i for i, word in enumerate(words) if word.startswith("-") and not _is_number(word)), len(words))


def _kind(key: str) -> str | None:
    setting, flag = settings().get(key), foreign_flags().get(key)
    if flag is not None:
        return flag.kind
    if setting is None:
        return None
    return "switch" if setting.is_switch else "list" if setting.is_list else "one"


def _names() -> set[str]:
    return {as_flag(key) for key in (*settings(), *foreign_flags()) if "." not in key}


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def written(given: GivenSetting) -> str:
    """Return a setting as it was written: the flag and its value."""
    if given.key == "model" and given.place == "MODEL":
        return str(given.value)
    if isinstance(given.value, bool):
        return given.place
    return f"{given.place} {' '.join(given.value) if isinstance(given.value, list) else given.value}"
