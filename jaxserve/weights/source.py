"""The interface of an open checkpoint, for every file format: tensor names, shapes, and how to read one tensor.

Names are Hugging Face's. A source reads only headers until it is asked for a tensor, and it never uses jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxserve.params import Window
from jaxserve.quant import Stored

BLOCK_ELEMENTS = 1 << 17
"""Elements read at a time: small enough that a block and its temporaries stay in a core's cache."""

INTEGERS = ("I32", "I64")
"""The stored types that a parameter of integers may have; no other parameter may."""


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint: its shape in Hugging Face's order, and the name that the file gives its stored type.

    `unreadable` says why the tensor can't be read as weights (an unsupported type); it is empty if it can be.
    `quantized` says that the shape is that of quantized numbers, whose dimensions differ (`TensorPart.quantized_view`).
    """

    shape: tuple[int, ...]
    stored_type: str
    unreadable: str = ""
    quantized: bool = False


class TensorSource(Protocol):
    """A checkpoint that is open for reading. Several threads may read it at once."""

    @property
    def description(self) -> str:
        """The file or folder, for messages."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name, in the order of the file."""

    def read(self, name: str, window: Window, out: np.ndarray[Any, Any]) -> None:
        """Write a window of tensor `name`, a slice of each of its dimensions, into `out`.

        `out` has the window's shape, any strides and any float type, or an integer one for a tensor of integers; values
        are converted to that type. Only what the window covers is read (in a quantized row: the blocks that it
        touches), and besides `out` about `BLOCK_ELEMENTS` elements are held in memory.
        """


@runtime_checkable
class QuantizedSource(TensorSource, Protocol):
    """A checkpoint that has quantized matrices `[out, in]`: a weight is `scale * q + minimum`.

    The functions below are only for tensors whose `stored` has a scheme. Numbers and factors are in the order of inputs
    that `read_order` tells, in which groups are contiguous.
    """

    @property
    def stored(self) -> Stored:
        """How each tensor is stored."""

    def read_numbers(self, name: str, window: Window, out: np.ndarray[Any, Any]) -> None:
        """Write a window of the numbers `q` into `out`, uint8 with any strides: integers unsigned, fp8 and fp4
        as their bits."""

    def read_factors(self, name: str, window: Window, unit: int, out: np.ndarray[Any, Any]) -> None:
        """Write the factors of a window into `out`, `FACTORS` with any strides.

        In the last dimension of the window and of `out`, `unit` inputs count as one; they must divide the group.
        """

    def read_order(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return the model's input of each number of a row, int32 `[in]`; None if they are in the model's order."""

    def read_input_scale(self, name: str) -> float:
        """Return the scale of static activations."""


def row_blocks(window: Window, out: np.ndarray[Any, Any]) -> Iterator[tuple[Window, np.ndarray[Any, Any]]]:
    """Split a window into blocks of rows, of about `BLOCK_ELEMENTS` elements and at least one row each.

    Yields each block's window with the part of `out` that it fills. A tensor without dimensions is one block.
    """
    if not window:
        yield window, out
        return
    first, last = window[0].start, window[0].stop
    step = max(1, BLOCK_ELEMENTS // max(1, out[:1].size))
    for start in range(first, last, step):
        stop = min(start + step, last)
        yield (slice(start, stop), *window[1:]), out[start - first : stop - first]
