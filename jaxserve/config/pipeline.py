"""Reads `pp_layer_partition`: how the layers of a model are divided among its pipeline stages.

It needs no model. Whether the numbers add up to the model's layers is checked where the model is known.
"""

from __future__ import annotations

import re
from typing import Literal, Protocol

from jaxserve.errors import ConfigError

_NUMBERS = re.compile(r"\s*[1-9][0-9]{0,5}\s*(,\s*[1-9][0-9]{0,5}\s*)*")


class StageSettings(Protocol):
    """The settings of an `EngineConfig` that divide a model into stages."""

    @property
    def pp_size(self) -> int:
        """The number of stages."""
        ...

    @property
    def pp_layer_partition(self) -> str:
        """How layers are divided among them."""
        ...


def layer_partition(config: StageSettings) -> Literal["memory", "layers"] | tuple[int, ...]:
    """Return how layers are divided among stages: by memory, evenly, or the number of layers of each stage.

    Raises `ConfigError` if the setting is anything else, or if there isn't a number for each stage.
    """
    text, stages = config.pp_layer_partition, config.pp_size
    if text in ("memory", "layers"):
        return "memory" if text == "memory" else "layers"
    if not _NUMBERS.fullmatch(text):
        raise ConfigError(
            f"pp_layer_partition must be memory, layers, or the number of layers of each stage (each at least 1), such "
            f"as 20,22; got {text!r}"
        )
    numbers = tuple(map(int, text.split(",")))
    if len(numbers) != stages:
        raise ConfigError(
            f"pp_layer_partition={text} needs pp_size={len(numbers)}, a stage for each number, and pp_size is "
            f"{stages}: change one of them"
        )
    return numbers
