"""Refuses weights that hold NaN or infinity.

One NaN in the weights makes every answer NaN, and data that was read wrongly soon contains one. Each weight is checked
once, while the block that was read is still in a core's cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.params import Window
from jaxserve.weights.source import TensorInfo, TensorSource, row_blocks


class FiniteSource:
    """A source that checks the tensors of another one as they are read. Raises `ConfigError` naming the tensor."""

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


def check_finite(values: np.ndarray[Any, Any], name: str, where: str) -> None:
    """Raise `ConfigError` if `values`, which belong to tensor `name`, hold NaN or infinity."""
    if not is_finite(values):
        raise ConfigError(
            f"{where}: tensor {name} holds NaN or infinity (or numbers too large for {values.dtype}): the file is "
            "damaged; fetch it again"
        )


def is_finite(values: np.ndarray[Any, Any]) -> bool:
    """Return whether `values` hold neither NaN nor infinity.

    Seen as integers, NaN and infinity are the largest values with and without the sign bit. numpy compares integers at
    the speed of memory, which also serves types that numpy itself doesn't know.
    """
    if values.dtype.kind in "iu":
        return True
    infinity = int(np.array(np.inf, values.dtype).view(f"u{values.itemsize}"))
    negative = infinity | 1 << (8 * values.itemsize - 1)
    unsigned, signed = values.view(f"u{values.itemsize}"), values.view(f"i{values.itemsize}")
    return not values.size or bool(unsigned.max() < negative and signed.max() < infinity)
