"""Refuses weights that are no numbers: one NaN makes every answer NaN, and of what was read wrongly some soon is one.

Owns the test of an array. It looks at each weight once, while what was read of it is still in a core's cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.params import Window
from jaxserve.weights.source import BlockSource, TensorInfo, TensorSource, row_blocks


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
        for block, part in row_blocks(window, out):
            self._source.read(name, block, part)
            check_finite(part, name, self.description)


class FiniteBlockSource(FiniteSource):
    """The same for one that has quantized tensors."""

    def __init__(self, source: BlockSource) -> None:
        super().__init__(source)
        self._blocks = source

    def read_blocks(self, name: str, window: Window, out: np.ndarray[Any, Any]) -> None:
        """See `BlockSource`."""
        for block, part in row_blocks(window, out):
            self._blocks.read_blocks(name, block, part)
            for factor in ("scale", "minimum"):
                check_finite(part[factor], name, self.description)


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
    """Whether there is neither NaN nor infinity in them.

    As whole numbers of their size these two are the largest with the sign bit and without: numpy compares them as fast
    as memory is read, also those of types that it doesn't know itself.
    """
    infinity = int(np.array(np.inf, values.dtype).view(f"u{values.itemsize}"))
    negative = infinity | 1 << (8 * values.itemsize - 1)
    unsigned, signed = values.view(f"u{values.itemsize}"), values.view(f"i{values.itemsize}")
    return not values.size or bool(unsigned.max() < negative and signed.max() < infinity)
