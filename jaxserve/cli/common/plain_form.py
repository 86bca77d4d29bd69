"""Changes a command line to the form that argparse reads, where other engines take more forms of a flag."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from jaxserve.config.kv_events import KvEventsConfig
from jaxserve.config.mappings import read_mapping
from jaxserve.config.other_engines import foreign_flags
from jaxserve.config.settings import Setting, as_flag, as_key, settings
from jaxserve.errors import ConfigError

_LEVEL = re.compile(r"-O(\d)")


def in_plain_form(argv: Sequence[str]) -> list[str]:
    """Return a command line with hyphens for underscores in flags, and with `--flag.key value` as `--flag JSON`.

    vLLM takes both. All keys of one flag become one value. Raises `ConfigError`.
    """
    found: list[str] = []
    mappings: dict[str, dict[str, Any]] = {}
    rest = list(argv)
    while rest:
        item = rest.pop(0)
        if item == "-ep" and not (rest and rest[0].lstrip("-").isdigit()):
            item = "--enable-expert-parallel"  # vLLM's switch; SGLang's --ep has a number
        elif level := _LEVEL.fullmatch(item):
            item = f"--optimization-level={level[1]}"
        if not item.startswith("-"):
            found.append(item)
            continue
        name, equals, value = item.partition("=")
        name, dot, keys = name.partition(".")
        mapping = _mapping_of(as_key(name), has_key=bool(dot))
        flag = as_flag(mapping or as_key(name))
        if mapping is not None and (equals or rest):
            text = value if equals else rest.pop(0)
            inner: Any = _json_or_text(text) if dot else dict(read_mapping(text, flag, '{"key": "value"}'))
            for key in reversed(keys.split(".") if dot else ()):
                inner = {key: inner}
            if flag not in mappings:
                found += [flag, ""]
            _merge(mappings.setdefault(flag, {}), inner)
        elif name.startswith("--"):
            found.append(name.replace("_", "-") + dot + keys + equals + value)
        else:
            found.append(item)
    for flag, joined in mappings.items():
        try:
            found[found.index(flag) + 1] = json.dumps(joined)
        except RecursionError:
            raise ConfigError(f"{flag} is nested too deeply") from None
    return found


def _mapping_of(key: str, *, has_key: bool) -> str | None:
    """Return the key of a flag whose value is a mapping, by one of its names, else None.

    With `has_key`, it was written with a key, so that any flag of another engine may be one.
    """
    setting, flag = settings().get(key), foreign_flags().get(key)
    if setting is not None and _is_mapping(setting):
        return key
    if flag is None:
        return None
    renamed = settings().get(flag.meaning.sets)
    return flag.key if flag.kind == "mapping" or has_key or (renamed is not None and _is_mapping(renamed)) else None


def _is_mapping(setting: Setting) -> bool:
    return setting.is_mapping or setting.kind is KvEventsConfig


def _json_or_text(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _merge(mapping: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(mapping.get(key), dict):
            _merge(mapping[key], value)
        else:
            mapping[key] = value
