"""Reads what a configuration serves: the config of its model, with `hf_overrides` in it, and what the model is for.

All that need the config of the served model get it here, in the engine and in the processes that answer requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.config.model_files import fetch_model_config, has_other_tokenizer, tokenizer_files
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.model_source import ModelSource, read_config
from jaxserve.model_source.pooling import ModelTask
from jaxserve.model_source.tasks import read_task


@dataclasses.dataclass(frozen=True)
class ServedCheckpoint:
    """The config of a model in Hugging Face's form, the file that it is from, and what the model is for."""

    raw: Mapping[str, Any]
    where: str
    task: ModelTask

    @property
    def vocab_size(self) -> int | None:
        """The number of token ids that the model knows, None if its config doesn't say."""
        # A model of images and texts has its text model inside.
        inner = self.raw.get("text_config")
        found = (inner if isinstance(inner, Mapping) else {}).get("vocab_size", self.raw.get("vocab_size"))
        return found if isinstance(found, int) else None


def read_served_checkpoint(config: EngineConfig, source: ModelSource) -> ServedCheckpoint:
    """Return what a configuration serves, whose model has these files. Raises `ConfigError`."""
    return _served(config, read_config(source), source, str(source.config_file))


def fetch_served_checkpoint(config: EngineConfig) -> ServedCheckpoint:
    """Return what a configuration serves, for callers that need no weights. Raises as `fetch_config` does."""
    raw, source = fetch_model_config(config)
    return _served(config, raw, source, f"config of {config.model}")


def _served(config: EngineConfig, raw: Mapping[str, Any], source: ModelSource | None, where: str) -> ServedCheckpoint:
    raw = merged(raw, config.hf_overrides or {})
    asked: dict[str, Any] = {"runner": config.runner, "convert": config.convert, "pooling": config.pooling}
    task = read_task(source, raw, tokenizer=tokenizer_files(config) if has_other_tokenizer(config) else source, **asked)
    if config.speculative_method != "none" and not task.generates:
        raise ConfigError(
            f"speculative_method={config.speculative_method} drafts tokens, and {config.model} is served for vectors "
            "or labels only; leave it out, or set runner to generate if the model has a head for tokens"
        )
    return ServedCheckpoint(raw, where, task)


def merged(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with other fields; in objects, only the fields that are named change."""
    changed = dict(raw)
    for name, value in overrides.items():
        both = isinstance(value, Mapping) and isinstance(raw.get(name), Mapping)
        changed[name] = merged(raw[name], value) if both else value
    return changed
