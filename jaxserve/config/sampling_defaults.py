"""The sampling options of requests that name none: of the checkpoint's generation_config.json, and of settings.

The names and the meaning are those of vLLM's `generation_config` and `override_generation_config`. Of a file, only the
sampling options count; files of the hub have many other fields, for transformers.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from jaxserve.api_types import NUMBER_OPTIONS, SHARED_OPTIONS
from jaxserve.errors import ConfigError
from jaxserve.model_source import ModelSource
from jaxserve.model_source.fields import read_json
from jaxserve.model_source.generation_config import GENERATION_CONFIG, read_generation_config

logger = logging.getLogger("jaxserve.config")

_LIMIT = "max_new_tokens"
_OPTIONS = {name: NUMBER_OPTIONS[name].hint for name in SHARED_OPTIONS}
_ALL = {**_OPTIONS, _LIMIT: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]}


@dataclasses.dataclass(frozen=True)
class SamplingDefaults:
    """`options` are fields of `SamplingParams`; `max_tokens` is the most tokens of an answer, None for no limit."""

    options: Mapping[str, float] = dataclasses.field(default_factory=dict)
    max_tokens: int | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that have another default."""
        return {**self.options, **({} if self.max_tokens is None else {"max_tokens": self.max_tokens})}

    def limited(self, wanted: int | None) -> int | None:
        """Return the smaller of `max_tokens` and what was asked for; None if neither is given."""
        return min((limit for limit in (wanted, self.max_tokens) if limit is not None), default=None)


def read_override(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `override_generation_config`; null takes one away from those of a file.

    Raises `ConfigError` for one that isn't known, or out of range.
    """
    found = {}
    for name, value in given.items():
        if name not in _ALL:
            raise ConfigError(f"override_generation_config has no field {name}; it has {', '.join(_ALL)}")
        try:
            found[name] = msgspec.convert(value, _ALL[name] | None)
        except msgspec.ValidationError as error:
            raise ConfigError(f"override_generation_config: {name}={value!r}: {error}") from None
    return found


def read_sampling_defaults(choice: str, override: Mapping[str, Any] | None, source: ModelSource) -> SamplingDefaults:
    """Return the defaults of the model `source`, and log them.

    `choice` is the setting `generation_config`, `override` is `override_generation_config`. What a file has that is no
    sampling option is ignored; a value that is out of range, with a warning. Raises `ConfigError` if a chosen folder
    has no such file, or a file can't be read.
    """
    if choice == "vllm":
        found, place = dict[str, Any](), ""
    elif choice == "auto":
        # As in SGLang, and unlike in vLLM, the length that a checkpoint names for transformers limits no answer
        raw, place = read_generation_config(source)
        found = _valid(place, raw, _OPTIONS)
    else:
        file = Path(choice).expanduser() / GENERATION_CONFIG
        if not file.is_file():
            raise ConfigError(f"generation_config={choice}: there is no {file}; name a folder with it, or auto or vllm")
        place = str(file)
        found = _valid(place, read_json(file), _ALL)
    changes = read_override(override or {})
    by_place = {
        place: {name: value for name, value in found.items() if name not in changes},
        "override_generation_config": {name: value for name, value in changes.items() if value is not None},
    }
    shown = [f"{_written(fields)} from {place}" for place, fields in by_place.items() if fields]
    if shown:
        logger.info("Default sampling parameters: %s (--generation-config vllm reads no file)", "; ".join(shown))
    found = {name: value for fields in by_place.values() for name, value in fields.items()}
    return SamplingDefaults({name: found[name] for name in found if name != _LIMIT}, found.get(_LIMIT))


def _valid(place: str, raw: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, kind in kinds.items():
        if raw.get(name) is None:
            continue
        try:
            found[name] = msgspec.convert(raw[name], kind)
        except msgspec.ValidationError as error:
            logger.warning("%s: %s=%r is ignored: %s", place, name, raw[name], error)
    return found


def _written(fields: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in fields.items())
