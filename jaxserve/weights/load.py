"""Checks a checkpoint against a model's parameters, then reads it into them.

Nothing is read before the names and shapes match: every tensor has its mapping and every parameter its tensors.
Parameters are read one after the other in the file's order. Only the windows asked for are read, and the tensors of a
fused parameter (qkv, gate and up) are read directly into their part of it.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.params import ParamSpec, Path, TensorPart, Window, dotted
from jaxserve.quant import EMBEDDING, HEAD, packed_weights
from jaxserve.weights.arrays import WeightReader, flatten
from jaxserve.weights.mismatch import join_names, raise_mismatch
from jaxserve.weights.packed import BlockwiseSource, fill_packed, to_blockwise
from jaxserve.weights.source import BlockSource, TensorSource

_log = logging.getLogger(__name__)
_COPY_ELEMENTS = 1 << 14
"""Up to this many elements an extra copy is cheaper than several reads."""


def checkpoint_reader(
    abstract: Any, source: TensorSource, dense: Any = None, *, ignored: Callable[[str], bool] = lambda name: False
) -> WeightReader:
    """Return a reader of the parameters of `abstract` from `source`; so far only names and shapes have been read.

    If `abstract` has packed weights, `dense` is the same tree without them. `ignored` tells whether the checkpoint may
    hold a tensor of this name that no parameter uses. Raises `ConfigError` naming the tensors that are missing, left
    over, of the wrong shape, or of a type that can't be read.
    """
    leaves, _ = flatten(abstract)
    packed = packed_weights(abstract)
    # A packed weight is one leaf (its bytes), one level below the path that its parts belong to
    owners = [path[:-1] if path[:-1] in packed else path for path, _ in leaves]
    specs = dict(flatten(abstract if dense is None else dense)[0])
    pieces = {path: spec.parts for path, spec in specs.items()}
    names = check_names(source, specs.values(), ignored)
    skipped = sorted(source.infos.keys() - names)
    if skipped:
        _log.info("weights: %d tensors of the checkpoint are not used: %s", len(skipped), join_names(skipped))
    if HEAD in packed and HEAD not in pieces:
        pieces[HEAD] = pieces[EMBEDDING]
    rank = {name: i for i, name in enumerate(source.infos)}
    pieces = {path: tuple(sorted(parts, key=lambda part: rank[part.name])) for path, parts in pieces.items()}
    position = {path: rank[parts[0].name] for path, parts in pieces.items()}
    shapes = {owner: spec.stored_shape for owner, (_, spec) in zip(owners, leaves)}
    _assert_covered(shapes | {path: weight.shape for path, weight in packed.items()}, pieces)
    blocks = BlockwiseSource(source) if isinstance(source, BlockSource) else None

    def fill(path: Path, spec: ParamSpec, window: Window, out: np.ndarray[Any, Any]) -> None:
        weight = packed.get(path[:-1])
        if weight is None:
            _fill_window(source, pieces[path], window, out)
            return
        assert out.shape == spec.shape, (dotted(path), window)
        origin: TensorSource = source
        mapped = pieces[path[:-1]]
        if weight.bits != 16:
            assert blocks is not None, source.description
            origin, mapped = blocks, tuple(map(to_blockwise, mapped))
        fill_packed(weight, functools.partial(_fill_window, origin, mapped), out)

    return WeightReader(fill, tuple(sorted(range(len(owners)), key=lambda i: position[owners[i]])))


def _fill_window(source: TensorSource, parts: Sequence[TensorPart], window: Window, out: np.ndarray[Any, Any]) -> None:
    """Write a window of a parameter that is made of these parts."""
    for part in parts:
        overlap = _overlap(window, part)
        if overlap is not None:
            inside = tuple(slice(c.start - w.start, c.stop - w.start) for c, w in zip(overlap, window))
            mapped = tuple(slice(c.start - i, c.stop - i) for c, i in zip(overlap, part.index))
            _read_part(source, part, mapped, out[inside])


def _overlap(window: Window, part: TensorPart) -> Window | None:
    """Return what a part fills of a window of its parameter, or None."""
    bounds = [
        (max(w.start, start), min(w.stop, start + length)) for w, start, length in zip(window, part.index, part.shape)
    ]
    return None if any(start >= stop for start, stop in bounds) else tuple(slice(*bound) for bound in bounds)


def _read_part(source: TensorSource, part: TensorPart, window: Window, out: np.ndarray[Any, Any]) -> None:
    """Fill `out` with a window of a part, in the parameter's order and with its offset."""
    if part.order is None:
        _read_window(source, part, window, out)
    else:
        axis, entries = part.order
        whole = (*window[:axis], slice(0, len(entries)), *window[axis + 1 :])
        values = np.empty([w.stop - w.start for w in whole], out.dtype)
        _read_window(source, part, whole, values)
        out[...] = values.take(entries[window[axis]], axis)
    if part.offset:
        out += np.asarray(part.offset, out.dtype)


def _read_window(source: TensorSource, part: TensorPart, window: Window, out: np.ndarray[Any, Any]) -> None:
    """Fill `out` with a window of a part, in as few reads as strides allow."""
    stored = _stored_window(_part_shape(source, part), part.shape, window)
    if stored is not None:
        stored_shape = tuple(each.stop - each.start for each in stored)
        stored = (slice(stored[0].start + part.first_row, stored[0].stop + part.first_row), *stored[1:])
        try:
            source.read(part.name, stored, np.reshape(out, stored_shape, copy=False))
            return
        except ValueError:  # `out` is scattered in its parameter: no strides give it the tensor's shape
            if out.size <= _COPY_ELEMENTS:
                values = np.empty(stored_shape, out.dtype)
                source.read(part.name, stored, values)
                out[...] = values.reshape(out.shape)
                return
    axis = next(axis for axis, length in enumerate(out.shape) if length > 1)
    for i, at in enumerate(range(window[axis].start, window[axis].stop)):
        one = (*window[:axis], slice(at, at + 1), *window[axis + 1 :])
        _read_window(source, part, one, out[(slice(None),) * axis + (slice(i, i + 1),)])


def _part_shape(source: TensorSource, part: TensorPart) -> tuple[int, ...]:
    """Return the shape of the tensor's rows that are this part."""
    _, *inner = source.infos[part.name].shape
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


def check_names(source: TensorSource, specs: Collection[ParamSpec], ignored: Callable[[str], bool]) -> set[str]:
    """Return the names of the tensors that the parameters are made of.

    Raises `ConfigError` unless every part has a readable tensor of a fitting shape, and every tensor its parts.
    """
    infos = source.infos
    by_name: dict[str, list[TensorPart]] = defaultdict(list)
    for part in (part for spec in specs for part in spec.parts):
        by_name[part.name].append(part)
    unused = {name for spec in specs for name in spec.unused}
    used = sorted(name for name in by_name if name in infos)
    mismatches = [
        ("missing", sorted(name for name in by_name if name not in infos)),
        (
            "left over (this model has no place for them)",
            sorted(n for n in infos if n not in by_name and n not in unused and not ignored(n)),
        ),
        (
            "of the wrong shape",
            [
                f"{name} {list(infos[name].shape)} instead of {_expected_shape(by_name[name])}"
                for name in used
                if not _fits(infos[name].shape, by_name[name])
            ],
        ),
        ("not readable", [f"{name} ({infos[name].unreadable})" for name in used if infos[name].unreadable]),
    ]
    advice = "Check that config and weights belong together and that the download is complete"
    raise_mismatch(source.description, mismatches, advice)
    return set(by_name)


def _expected_shape(parts: Sequence[TensorPart]) -> list[int]:
    """Return the shape of a tensor as messages show it: that of its only part, or of the rows of all parts."""
    if len(parts) == 1:
        return list(parts[0].shape)
    inner = parts[0].shape[-1] if len(parts[0].shape) > 1 else 1
    return [sum(math.prod(part.shape) for part in parts) // inner, inner]


def _fits(stored: tuple[int, ...], parts: Sequence[TensorPart]) -> bool:
    """Return whether a tensor has the rows of all its parts; a transposed tensor doesn't."""
    inner = math.prod(stored[1:])
    sizes = [math.prod(part.shape) for part in parts]
    return sum(sizes) == math.prod(stored) and all(
        size % inner == 0 and _split_points((size // inner, *stored[1:])) <= _split_points(part.shape)
        for size, part in zip(sizes, parts)
    )


def _assert_covered(shapes: Mapping[Path, tuple[int, ...]], pieces: Mapping[Path, Sequence[TensorPart]]) -> None:
    """Assert that the parts fill every parameter: they are code of the model family, not input of a user."""
    for path, shape in shapes.items():
        written = sum(math.prod(part.shape) for part in pieces.get(path, ()))
        assert written == math.prod(shape), f"{dotted(path)} {shape}: {written} elements have a tensor"
        for part in pieces[path]:
            fits = all(i + n <= size for i, n, size in zip(part.index, part.shape, shape, strict=True))
            assert fits, f"{part.name} at {part.index} exceeds {dotted(path)} {shape}"
    assert pieces.keys() <= shapes.keys(), sorted(map(dotted, pieces.keys() - shapes.keys()))


def _split_points(shape: tuple[int, ...]) -> set[int]:
    return {math.prod(shape[:i]) for i in range(len(shape) + 1)} | {1}
