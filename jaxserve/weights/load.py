"""Checks a checkpoint against a model's parameters, then streams it into them.

Owns the match of names and shapes: nothing is read before every tensor has its place and every parameter its tensors.
Parameters are made one after the other in the file's order, and of each only the windows that somebody asks for are
read, the pieces of a fused one (qkv, gate and up) straight to where they stand in it.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.params import ParamSpec, Path, Placement, Window, dotted
from jaxserve.quant import EMBEDDING, HEAD, packed_weights
from jaxserve.weights.arrays import WeightReader, build, flatten
from jaxserve.weights.mismatch import listed, refuse_misfit
from jaxserve.weights.packed import Blocks, fill_packed, placed_in_blocks
from jaxserve.weights.source import BlockSource, TensorSource

_log = logging.getLogger(__name__)
_SMALL = 1 << 14
"""Elements that are rather copied once more than read in several parts."""


def load_params(
    abstract: Any,
    source: TensorSource,
    placements: Mapping[str, Placement],
    shardings: Any,
    *,
    ignored: Callable[[str], bool] = lambda name: False,
) -> Any:
    """The parameters of `abstract`, filled from `source`, as jax arrays in the specs' types on `shardings`.

    Raises as `checkpoint_reader` does.
    """
    return build(abstract, shardings, checkpoint_reader(abstract, source, placements, ignored=ignored))


def checkpoint_reader(
    abstract: Any,
    source: TensorSource,
    placements: Mapping[str, Placement],
    *,
    ignored: Callable[[str], bool] = lambda name: False,
) -> WeightReader:
    """What reads the parameters of `abstract` from `source`; nothing has been read of it yet but names and shapes.

    `ignored` names what the checkpoint may hold without a use. Raises `ConfigError` naming the tensors that are
    missing, left over, of the wrong shape, or of a type that can't be read.
    """
    leaves, _ = flatten(abstract)
    packed = packed_weights(abstract)
    # A packed weight is one leaf, its bytes, below the path that tensors are placed at
    owners = [path[:-1] if path[:-1] in packed else path for path, _ in leaves]
    check_names(source, placements, ignored)
    skipped = [name for name in source.infos if name not in placements]
    if skipped:
        _log.info("weights: %d tensors of the checkpoint have no use here: %s", len(skipped), listed(sorted(skipped)))
    pieces: dict[Path, list[tuple[str, Placement]]] = defaultdict(list)
    position: dict[Path, int] = {}
    for i, name in enumerate(source.infos):
        if name in placements:
            placement = placements[name]
            pieces[placement.path].append((name, placement))
            position.setdefault(placement.path, i)
    if HEAD in packed and HEAD not in pieces:
        pieces[HEAD], position[HEAD] = pieces[EMBEDDING], position[EMBEDDING]
    shapes = {owner: spec.stored_shape for owner, (_, spec) in zip(owners, leaves)}
    _check_cover(shapes | {path: weight.shape for path, weight in packed.items()}, pieces)
    blocks = Blocks(source) if isinstance(source, BlockSource) else None

    def fill(path: Path, spec: ParamSpec, window: Window, out: np.ndarray[Any, Any]) -> None:
        weight = packed.get(path[:-1])
        if weight is None:
            _fill(source, pieces[path], window, out)
            return
        assert out.shape == spec.shape, (dotted(path), window)
        origin: TensorSource = source
        placed = pieces[path[:-1]]
        if weight.bits != 16:
            assert blocks is not None, source.description
            origin, placed = blocks, [(name, placed_in_blocks(placement)) for name, placement in placed]
        fill_packed(weight, functools.partial(_fill, origin, placed), out)

    return WeightReader(fill, tuple(sorted(range(len(owners)), key=lambda i: position[owners[i]])))


def _fill(
    source: TensorSource, pieces: Sequence[tuple[str, Placement]], window: Window, out: np.ndarray[Any, Any]
) -> None:
    """Writes a window of a parameter, which is made of these tensors."""
    for name, placement in pieces:
        common = _common(window, placement)
        if common is not None:
            inside = tuple(slice(c.start - w.start, c.stop - w.start) for c, w in zip(common, window))
            placed = tuple(slice(c.start - i, c.stop - i) for c, i in zip(common, placement.index))
            _read(source, name, placement.shape, placed, out[inside])


def _common(window: Window, placement: Placement) -> Window | None:
    """What a window of a parameter has of a tensor that is placed in it, or None."""
    bounds = [
        (max(part.start, start), min(part.stop, start + length))
        for part, start, length in zip(window, placement.index, placement.shape)
    ]
    return None if any(start >= stop for start, stop in bounds) else tuple(slice(*bound) for bound in bounds)


def _read(source: TensorSource, name: str, shape: tuple[int, ...], window: Window, out: np.ndarray[Any, Any]) -> None:
    """Fills `out` with a window of a tensor that is placed with `shape`, in as few reads as strides allow."""
    stored = _as_stored(source.infos[name].shape, shape, window)
    if stored is not None:
        stored_shape = tuple(part.stop - part.start for part in stored)
        try:
            source.read(name, stored, np.reshape(out, stored_shape, copy=False))
            return
        except ValueError:  # `out` lies scattered in its parameter, and no strides give it the tensor's shape
            if out.size <= _SMALL:
                values = np.empty(stored_shape, out.dtype)
                source.read(name, stored, values)
                out[...] = values.reshape(out.shape)
                return
    axis = next(axis for axis, length in enumerate(out.shape) if length > 1)
    for i, at in enumerate(range(window[axis].start, window[axis].stop)):
        one = (*window[:axis], slice(at, at + 1), *window[axis + 1 :])
        _read(source, name, shape, one, out[(slice(None),) * axis + (slice(i, i + 1),)])


def _as_stored(stored: tuple[int, ...], placed: tuple[int, ...], window: Window) -> Window | None:
    """A window in the tensor's own dimensions, of which each is one or more neighbours of those it is placed with.

    None where it isn't one window there, as part of several rows of a dimension that is placed as two.
    """
    parts = []
    lengths = iter(zip(placed, window))
    for length in stored:
        size, start, stop = 1, 0, 1
        while size < length:
            inner, part = next(lengths)
            if stop - start > 1 and part.stop - part.start < inner:
                return None
            size, start, stop = size * inner, start * inner + part.start, (stop - 1) * inner + part.stop
        parts.append(slice(start, stop))
    return tuple(parts)


def check_names(source: TensorSource, placements: Mapping[str, Placement], ignored: Callable[[str], bool]) -> None:
    """Raises `ConfigError` unless every tensor has its place, and every place its tensor."""
    infos = source.infos
    used = sorted(name for name in placements if name in infos)
    faults = [
        ("missing", sorted(name for name in placements if name not in infos)),
        (
            "left over (this model has no place for them)",
            sorted(n for n in infos if n not in placements and not ignored(n)),
        ),
        (
            "of the wrong shape",
            [
                f"{name} {list(infos[name].shape)} instead of {list(placements[name].shape)}"
                for name in used
                if not _same_layout(infos[name].shape, placements[name].shape)
            ],
        ),
        ("not readable", [f"{name} ({infos[name].unreadable})" for name in used if infos[name].unreadable]),
    ]
    advice = "Check that config and weights belong together and that the download is complete"
    refuse_misfit(source.description, faults, advice)


def _check_cover(shapes: Mapping[Path, tuple[int, ...]], pieces: Mapping[Path, list[tuple[str, Placement]]]) -> None:
    """Placements are a model's own code: one that leaves part of a parameter unwritten is our fault, not a person's."""
    for path, shape in shapes.items():
        written = sum(math.prod(placement.shape) for _, placement in pieces.get(path, ()))
        assert written == math.prod(shape), f"{dotted(path)} {shape}: {written} elements are placed"
        for name, placement in pieces[path]:
            fits = all(i + n <= size for i, n, size in zip(placement.index, placement.shape, shape, strict=True))
            assert fits, f"{name} at {placement.index} leaves {dotted(path)} {shape}"
    assert pieces.keys() <= shapes.keys(), sorted(map(dotted, pieces.keys() - shapes.keys()))


def _same_layout(stored: tuple[int, ...], placed: tuple[int, ...]) -> bool:
    """Whether the placed shape only splits dimensions of the stored one; that of a transposed tensor doesn't."""
    return math.prod(stored) == math.prod(placed) and _borders(stored) <= _borders(placed)


def _borders(shape: tuple[int, ...]) -> set[int]:
    return {math.prod(shape[:i]) for i in range(len(shape) + 1)} | {1}
