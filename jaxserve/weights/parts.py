"""Reads windows of a parameter from the tensors that it is made of (`TensorPart`)."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxserve.params import TensorPart, Window

_COPY_ELEMENTS = 1 << 14
"""Up to this many elements an extra copy is cheaper than several reads."""


class Tensors(NamedTuple):
    """The shapes of tensors by name, and how a window of one is read into an array of any strides.

    `quantized` tells whether a tensor has the dimensions of numbers (see `TensorInfo`).
    """

    shape: Callable[[str], tuple[int, ...]]
    read: Callable[[str, Window, np.ndarray[Any, Any]], None]
    quantized: Callable[[str], bool] = lambda name: False


class Parts:
    """The parts of a parameter, found by their first index: a mixture has a few for each expert."""

    def __init__(self, parts: Sequence[TensorPart]) -> None:
        self._parts = parts
        self._by_first: dict[int, list[TensorPart]] = defaultdict(list)
        if all(part.shape[0] == 1 for part in parts):
            for part in parts:
                self._by_first[part.index[0]].append(part)

    def near(self, window: Window) -> Iterable[TensorPart]:
        """Return all parts that a window may overlap."""
        if not self._by_first:
            return self._parts
        return [part for i in range(window[0].start, window[0].stop) for part in self._by_first.get(i, ())]


def fill_window(tensors: Tensors, parts: Parts, window: Window, out: np.ndarray[Any, Any]) -> None:
    """Write a window of a parameter that is made of these parts."""
    for part in parts.near(window):
        overlap = _overlap(window, part)
        if overlap is not None:
            inside = tuple(slice(c.start - w.start, c.stop - w.start) for c, w in zip(overlap, window))
            mapped = tuple(slice(c.start - i, c.stop - i) for c, i in zip(overlap, part.index))
            _read_part(tensors, part, mapped, out[inside])


def _overlap(window: Window, part: TensorPart) -> Window | None:
    """Return the part of a window of a parameter that a part fills, or None."""
    bounds = [
        (max(w.start, start), min(w.stop, start + length)) for w, start, length in zip(window, part.index, part.shape)
    ]
    return None if any(start >= stop for start, stop in bounds) else tuple(slice(*bound) for bound in bounds)


def viewed_shape(part: TensorPart, *, quantized: bool) -> tuple[int, ...]:
    """Return the dimensions of a part as its tensor has them."""
    view = part.quantized_view if quantized else part.view
    return part.shape if view is None else view.shape


def _read_part(tensors: Tensors, part: TensorPart, window: Window, out: np.ndarray[Any, Any]) -> None:
    """Fill `out` with a window of a part, in the parameter's order and with its offset."""
    view = part.quantized_view if tensors.quantized(part.name) else part.view
    if view is not None:
        _read_view(tensors, dataclasses.replace(part, shape=view.shape), view.axes, window, out)
    elif part.order is None:
        _read_window(tensors, part, window, out)
    else:
        axis, entries = part.order
        whole = (*window[:axis], slice(0, len(entries)), *window[axis + 1 :])
        values = np.empty([w.stop - w.start for w in whole], out.dtype)
        _read_window(tensors, part, whole, values)
        out[...] = values.take(entries[window[axis]], axis)
    if part.offset:
        out += np.asarray(part.offset, out.dtype)


def _read_view(
    tensors: Tensors, part: TensorPart, axes: tuple[int, ...], window: Window, out: np.ndarray[Any, Any]
) -> None:
    """Fill `out` with a window of a part whose dimensions are those of `part.shape` in the order of `axes`.

    Reads a window of the first dimension at a time, with all of every dimension that shares one of the tensor's.
    """
    stored = _part_shape(tensors, part)
    of_part = [window[axes.index(axis)] for axis in range(len(axes))]
    shared = _inner_dimensions(stored, part.shape)
    read = [slice(0, part.shape[i]) if i in shared else each for i, each in enumerate(of_part)]
    chosen = tuple(each if i in shared else slice(None) for i, each in enumerate(of_part))
    into = np.moveaxis(out, [axes.index(axis) for axis in range(len(axes))], range(len(axes)))
    values = np.empty([1, *(each.stop - each.start for each in read[1:])], out.dtype)
    for i, first in enumerate(range(read[0].start, read[0].stop)):
        _read_window(tensors, part, (slice(first, first + 1), *read[1:]), values)
        into[i] = values[(slice(None), *chosen[1:])][0]


def _inner_dimensions(stored: tuple[int, ...], mapped: tuple[int, ...]) -> set[int]:
    """Return the mapped dimensions that follow another one inside the same stored dimension."""
    inner, at = set(), 0
    for length in stored:
        size, first = 1, at
        while size < length:
            size *= mapped[at]
            at += 1
        inner |= set(range(first + 1, at))
    return inner


def _read_window(tensors: Tensors, part: TensorPart, window: Window, out: np.ndarray[Any, Any]) -> None:
    """Fill `out` with a window of a part, in as few reads as strides allow."""
    stored = _stored_window(_part_shape(tensors, part), part.shape, window)
    if stored is not None:
        stored_shape = tuple(each.stop - each.start for each in stored)
        stored = (slice(stored[0].start + part.first_row, stored[0].stop + part.first_row), *stored[1:])
        try:
            tensors.read(part.name, stored, np.reshape(out, stored_shape, copy=False))
            return
        except ValueError:  # `out` is scattered in its parameter: no strides give it the tensor's shape
            if out.size <= _COPY_ELEMENTS:
                values = np.empty(stored_shape, out.dtype)
                tensors.read(part.name, stored, values)
                out[...] = values.reshape(out.shape)
                return
    axis = next(axis for axis, length in enumerate(out.shape) if length > 1)
    for i, at in enumerate(range(window[axis].start, window[axis].stop)):
        one = (*window[:axis], slice(at, at + 1), *window[axis + 1 :])
        _read_window(tensors, part, one, out[(slice(None),) * axis + (slice(i, i + 1),)])


def _part_shape(tensors: Tensors, part: TensorPart) -> tuple[int, ...]:
    """Return the shape of the tensor's rows that are this part."""
    _, *inner = tensors.shape(part.name)
    return math.prod(part.shape) // math.prod(inner), *inner


def _stored_window(stored: tuple[int, ...], mapped: tuple[int, ...], window: Window) -> Window | None:
    """Return a window of the mapped shape as a window of the stored shape.

    Each stored dimension is the product of one or more adjacent mapped dimensions. Returns None if the window isn't a
    single window there, for example parts of several rows of a dimension that is mapped as two.
    """
    parts = []
    lengths = iter(zip(mapped, window))
    for length in stored:
        size, start, stop = 1, 0, 1
        while size < length:
            inner, part = next(lengths)
            if stop - start > 1 and part.stop - part.start < inner:
                return None
            size, start, stop = size * inner, start * inner + part.start, (stop - 1) * inner + part.stop
        parts.append(slice(start, stop))
    return tuple(parts)
