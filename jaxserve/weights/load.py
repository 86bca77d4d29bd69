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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.params import ParamSpec, Path, TensorMapping, Window, dotted
from jaxserve.quant import EMBEDDING, HEAD, packed_weights
from jaxserve.weights.arrays import WeightReader, flatten
from jaxserve.weights.mismatch import join_names, raise_mismatch
from jaxserve.weights.packed import BlockwiseSource, fill_packed, to_blockwise
from jaxserve.weights.source import BlockSource, TensorSource

_log = logging.getLogger(__name__)
_COPY_ELEMENTS = 1 << 14
"""Up to this many elements an extra copy is cheaper than several reads."""


def checkpoint_reader(
    abstract: Any,
    source: TensorSource,
    mappings: Mapping[str, TensorMapping],
    *,
    ignored: Callable[[str], bool] = lambda name: False,
) -> WeightReader:
    """Return a reader of the parameters of `abstract` from `source`; so far only names and shapes have been read.

    `ignored` tells whether the checkpoint may hold a tensor of this name that no parameter uses. Raises `ConfigError`
    naming the tensors that are missing, left over, of the wrong shape, or of a type that can't be read.
    """
    leaves, _ = flatten(abstract)
    packed = packed_weights(abstract)
    # A packed weight is one leaf (its bytes), one level below the path that tensors are mapped to
    owners = [path[:-1] if path[:-1] in packed else path for path, _ in leaves]
    check_names(source, mappings, ignored)
    skipped = [name for name in source.infos if name not in mappings]
    if skipped:
        _log.info("weights: %d tensors of the checkpoint are not used: %s", len(skipped), join_names(sorted(skipped)))
    pieces: dict[Path, list[tuple[str, TensorMapping]]] = defaultdict(list)
    position: dict[Path, int] = {}
    for i, name in enumerate(source.infos):
        if name in mappings:
            mapping = mappings[name]
            pieces[mapping.path].append((name, mapping))
            position.setdefault(mapping.path, i)
    if HEAD in packed and HEAD not in pieces:
        pieces[HEAD], position[HEAD] = pieces[EMBEDDING], position[EMBEDDING]
    shapes = {owner: spec.stored_shape for owner, (_, spec) in zip(owners, leaves)}
    _check_coverage(shapes | {path: weight.shape for path, weight in packed.items()}, pieces)
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
            origin, mapped = blocks, [(name, to_blockwise(mapping)) for name, mapping in mapped]
        fill_packed(weight, functools.partial(_fill_window, origin, mapped), out)

    return WeightReader(fill, tuple(sorted(range(len(owners)), key=lambda i: position[owners[i]])))


def _fill_window(
    source: TensorSource, pieces: Sequence[tuple[str, TensorMapping]], window: Window, out: np.ndarray[Any, Any]
) -> None:
    """Write a window of a parameter that is made of these tensors."""
    for name, mapping in pieces:
        overlap = _overlap(window, mapping)
        if overlap is not None:
            inside = tuple(slice(c.start - w.start, c.stop - w.start) for c, w in zip(overlap, window))
            mapped = tuple(slice(c.start - i, c.stop - i) for c, i in zip(overlap, mapping.index))
            _read_window(source, name, mapping.shape, mapped, out[inside])


def _overlap(window: Window, mapping: TensorMapping) -> Window | None:
    """Return the part of a window of a parameter that a tensor fills, or None."""
    bounds = [
        (max(part.start, start), min(part.stop, start + length))
        for part, start, length in zip(window, mapping.index, mapping.shape)
    ]
    return None if any(start >= stop for start, stop in bounds) else tuple(slice(*bound) for bound in bounds)


def _read_window(
    source: TensorSource, name: str, shape: tuple[int, ...], window: Window, out: np.ndarray[Any, Any]
) -> None:
    """Fill `out` with a window of a tensor that is mapped as `shape`, in as few reads as strides allow."""
    stored = _stored_window(source.infos[name].shape, shape, window)
    if stored is not None:
        stored_shape = tuple(part.stop - part.start for part in stored)
        try:
            source.read(name, stored, np.reshape(out, stored_shape, copy=False))
            return
        except ValueError:  # `out` is scattered in its parameter: no strides give it the tensor's shape
            if out.size <= _COPY_ELEMENTS:
                values = np.empty(stored_shape, out.dtype)
                source.read(name, stored, values)
                out[...] = values.reshape(out.shape)
                return
    axis = next(axis for axis, length in enumerate(out.shape) if length > 1)
    for i, at in enumerate(range(window[axis].start, window[axis].stop)):
        one = (*window[:axis], slice(at, at + 1), *window[axis + 1 :])
        _read_window(source, name, shape, one, out[(slice(None),) * axis + (slice(i, i + 1),)])


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


def check_names(source: TensorSource, mappings: Mapping[str, TensorMapping], ignored: Callable[[str], bool]) -> None:
    """Raise `ConfigError` unless every tensor has a mapping of a fitting shape, and every mapping a readable tensor."""
    infos = source.infos
    used = sorted(name for name in mappings if name in infos)
    mismatches = [
        ("missing", sorted(name for name in mappings if name not in infos)),
        (
            "left over (this model has no place for them)",
            sorted(n for n in infos if n not in mappings and not ignored(n)),
        ),
        (
            "of the wrong shape",
            [
                f"{name} {list(infos[name].shape)} instead of {list(mappings[name].shape)}"
                for name in used
                if not _same_layout(infos[name].shape, mappings[name].shape)
            ],
        ),
        ("not readable", [f"{name} ({infos[name].unreadable})" for name in used if infos[name].unreadable]),
    ]
    advice = "Check that config and weights belong together and that the download is complete"
    raise_mismatch(source.description, mismatches, advice)


def _check_coverage(
    shapes: Mapping[Path, tuple[int, ...]], pieces: Mapping[Path, list[tuple[str, TensorMapping]]]
) -> None:
    """Assert that the mappings fill every parameter: they are code of the model family, not input of a user."""
    for path, shape in shapes.items():
        written = sum(math.prod(mapping.shape) for _, mapping in pieces.get(path, ()))
        assert written == math.prod(shape), f"{dotted(path)} {shape}: {written} elements are mapped"
        for name, mapping in pieces[path]:
            fits = all(i + n <= size for i, n, size in zip(mapping.index, mapping.shape, shape, strict=True))
            assert fits, f"{name} at {mapping.index} exceeds {dotted(path)} {shape}"
    assert pieces.keys() <= shapes.keys(), sorted(map(dotted, pieces.keys() - shapes.keys()))


def _same_layout(stored: tuple[int, ...], mapped: tuple[int, ...]) -> bool:
    """Return whether the mapped shape only splits dimensions of the stored one; a transposed tensor's doesn't."""
    return math.prod(stored) == math.prod(mapped) and _split_points(stored) <= _split_points(mapped)


def _split_points(shape: tuple[int, ...]) -> set[int]:
    return {math.prod(shape[:i]) for i in range(len(shape) + 1)} | {1}
