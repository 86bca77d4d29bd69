"""Reads `--pp-layer-partition`."""

from __future__ import annotations

from typing import Literal

from jaxserve.config.schema import EngineConfig


def layer_partition(config: EngineConfig) -> Literal["memory", "layers"] | tuple[int, ...]:
    """Return how layers are divided."""
    text = config.pp_layer_partition
    if text in ("memory", "layers"):
        return text  # type: ignore[return-value]
    return tuple(map(int, text.split(",")))
