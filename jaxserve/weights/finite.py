"""Refuses weights that are no numbers: one NaN makes every answer NaN, and of what was read wrongly some soon is one.

Owns the test of an array. It looks at each weight once, while it is read anyway.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.params import Window
from jaxserve.weights.source import BLOCK_ELEMENTS, BlockSource, TensorInfo, TensorSource

_BFLOAT16_INFINITY = 0x7F80


class FiniteSource:
    """Another source, whose tensors are checked as they are read. Raises `ConfigError` naming the tensor."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    @property
    def description(self) -> str:
        return self._source.description

    @property
    def infos(self) -> dict[str, TensorInfo]:
        return dict(self._source.infos)

    def read(self, name: str, window: Window, out: np.ndarray[Any, Any]) -> None:
        """See `TensorSource`."""
        self._source.read(name, window, out)
        check_finite(out, name, self.description)


class FiniteBlockSource(FiniteSource):
    """The same for one that has quantized tensors."""

    def __init__(self, source: BlockSource) -> None:
        super().__init__(source)
        self._blocks = source

    def read_blocks(self, name: str, window: Window, out: np.ndarray[Any, Any]) -> None:
        """See `BlockSource`."""
        self._blocks.read_blocks(name, window, out)
        for factor in ("scale", "minimum"):
            check_finite(out[factor], name, self.description)


def checked(source: TensorSource) -> TensorSource:
    """`source` with its tensors checked."""
    return FiniteBlockSource(source) if isinstance(source, BlockSource) else FiniteSource(source)


def check_finite(values: np.ndarray[Any, Any], name: str, where: str) -> None:
    """Raises unless all of `values`, of the tensor `name`, are numbers."""
    if not is_finite(values):
        raise ConfigError(
            f"{where}: tensor {name} holds NaN or infinity (or numbers too large for {values.dtype}): the file is "
            "damaged; fetch it again"
        )


def is_finite(values: np.ndarray[Any, Any]) -> bool:
    """Whether there is neither NaN nor infinity in them."""
    step = max(1, BLOCK_ELEMENTS // max(1, values[:1].size))  # stays in a core's cache
    return all(_block_is_finite(values[start : start + step]) for start in range(0, len(values), step))


def _block_is_finite(values: np.ndarray[Any, Any]) -> bool:
    if values.dtype == ml_dtypes.bfloat16:
        return bool((values.view(np.uint16) & 0x7FFF).max(initial=0) < _BFLOAT16_INFINITY)
    # NaN survives both
    return bool(np.isfinite(values.max(initial=0)) and np.isfinite(values.min(initial=0)))
