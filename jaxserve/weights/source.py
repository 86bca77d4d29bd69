"""What a checkpoint looks like to the loader, whatever its file format: names, shapes, and a way to read one tensor.

Names are Hugging Face's. A source reads nothing but headers until it is asked for a tensor, and it never sees jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

BLOCK_ELEMENTS = 1 << 17
"""Elements read at a time: small enough that a block and its temporaries stay in a core's cache."""


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint: its shape in Hugging Face's order, and the type it is stored in, as the file says it.

    `unreadable` tells why the tensor can't be read (an unsupported type), or is empty.
    """

    shape: tuple[int, ...]
    stored_type: str
    unreadable: str = ""


class TensorSource(Protocol):
    """A checkpoint that is open for reading; may be read from several threads."""

    @property
    def description(self) -> str:
        """The file or folder, for messages."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name, in the order of the file."""

    def read_rows(self, name: str, start: int, out: np.ndarray[Any, Any]) -> None:
        """Writes rows `start`, `start + 1`, … of tensor `name` into `out`: as many as `out` has, whatever its strides.

        A row is an index of the first dimension; `out` is of any float type, values are converted to it. Holds about
        `BLOCK_ELEMENTS` elements besides `out`, not the tensor.
        """


def row_blocks(out: np.ndarray[Any, Any]) -> Iterator[slice]:
    """Slices of the first dimension of `out` that hold about `BLOCK_ELEMENTS` elements each, at least one row."""
    rows = out.shape[0]
    step = max(1, BLOCK_ELEMENTS // max(1, out[:1].size))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
