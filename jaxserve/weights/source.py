"""What a checkpoint looks like to the loader, whatever its file format: names, shapes, and a way to read one tensor.

Names are Hugging Face's. A source reads nothing but headers until it is asked for a tensor, and it never sees jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxserve.params import Window

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

    def read(self, name: str, window: Window, out: np.ndarray[Any, Any]) -> None:
        """Writes a window of tensor `name`, a slice of each of its dimensions, into `out`, whatever its strides.

        `out` has the window's shape and any float type, values are converted to it. Only what the window covers is read
        (in a quantized row: the blocks that it touches), and about `BLOCK_ELEMENTS` elements are held besides `out`.
        """


@runtime_checkable
class BlockSource(TensorSource, Protocol):
    """One that has quantized tensors."""

    def read_blocks(self, name: str, window: Window, out: np.ndarray[Any, Any]) -> None:
        """Writes a window of a matrix as it is stored into `out`, `BLOCK_DTYPE`, whatever its strides; 32 neighbours of
        the last dimension count as one, in the window as in `out`. The tensor's type must be one of `BLOCK_KINDS`."""


def row_blocks(window: Window, out: np.ndarray[Any, Any]) -> Iterator[tuple[Window, np.ndarray[Any, Any]]]:
    """The window in blocks of rows, of about `BLOCK_ELEMENTS` elements and at least one row, with the part of `out`
    that each fills."""
    first, last = window[0].start, window[0].stop
    step = max(1, BLOCK_ELEMENTS // max(1, out[:1].size))
    for start in range(first, last, step):
        stop = min(start + step, last)
        yield (slice(start, stop), *window[1:]), out[start - first : stop - first]
