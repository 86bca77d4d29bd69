"""Tells what a model is for, from its config, the files of sentence-transformers beside it, and what was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from jaxserve.model_source.pooling import ModelTask, PooledTask, Pooling
from jaxserve.model_source.source import ModelSource

Runner = Literal["auto", "generate", "pooling"]
Convert = Literal["auto", "none", "embed", "classify"]


def read_task(
    source: ModelSource | None,
    raw: Mapping[str, Any],
    *,
    runner: Runner = "auto",
    convert: Convert = "auto",
    pooling: Literal["auto", "last", "mean"] = "auto",
) -> ModelTask:
    """Return what a model with the config `raw` is for; without a `source`, only its config.json is here.

    Raises `ConfigError` for what doesn't fit the checkpoint, or isn't supported.
    """
    embeds = convert == "embed" or (runner == "pooling" and convert == "auto")
    pooled = None
    if embeds:
        method = "last" if pooling == "auto" else pooling
        pooled = PooledTask(kind="embed", pooling=Pooling(method), size=int(raw["hidden_size"]))
    return ModelTask(generates=runner == "generate" or pooled is None, pooled=pooled)
