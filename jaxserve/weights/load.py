"""Checks a checkpoint against a model's parameters, then reads it into them.

Nothing is read before the names and shapes match: every tensor has its mapping and every parameter its tensors.
Parameters are read one after the other in the file's order. Only the windows asked for are read, and the tensors of a
fused parameter (qkv, gate and up) are read directly into their part of it.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.params import ParamSpec, Path, TensorPart, Window, dotted
from jaxserve.quant import held_weights
from jaxserve.weights.arrays import WeightReader, flatten
from jaxserve.weights.mismatch import join_names, raise_mismatch
from jaxserve.weights.parts import Parts, Tensors, fill_window, viewed_shape
from jaxserve.weights.quantized.held import held_reader, with_head
from jaxserve.weights.quantized.rows import CheckpointRows
from jaxserve.weights.source import INTEGERS, QuantizedSource, TensorInfo, TensorSource

_log = logging.getLogger(__name__)


def checkpoint_reader(
    abstract: Any,
    source: TensorSource,
    dense: Any = None,
    *,
    quantized: QuantizedSource | None = None,
    ignored: Callable[[str], bool] = lambda name: False,
    part: str = "",
) -> WeightReader:
    """Return a reader of the parameters of `abstract` from `source`; so far only names and shapes have been read.

    If `abstract` has quantized or packed weights, `dense` is the same tree without them, and `quantized` the source of
    those that the checkpoint has quantized. `ignored` tells whether the checkpoint may hold a tensor of this name that
    no parameter uses; the names of such tensors are logged if they begin with `part`. Raises `ConfigError` naming the
    tensors that are missing, left over, of the wrong shape, or of a type that can't be read.
    """
    dense = abstract if dense is None else dense
    leaves, _ = flatten(dense)
    specs = dict(leaves)
    names = check_names(source, specs.values(), ignored)
    skipped = sorted(name for name in source.infos.keys() - names if name.startswith(part))
    if skipped:
        _log.info(
            "weights: %d tensors of the checkpoint are no parameters of the model: %s",
            len(skipped),
            join_names(skipped),
        )
    rank = {name: i for i, name in enumerate(source.infos)}
    pieces = {path: tuple(sorted(spec.parts, key=lambda part: rank[part.name])) for path, spec in leaves}
    _assert_covered({path: spec.stored_shape for path, spec in leaves}, pieces)
    infos = source.infos
    tensors = Tensors(lambda name: infos[name].shape, source.read, lambda name: infos[name].quantized)

    parts = {path: Parts(own) for path, own in pieces.items()}

    def fill(path: Path, spec: ParamSpec, window: Window, out: np.ndarray[Any, Any]) -> None:
        fill_window(tensors, parts[path], window, out)

    order = sorted(range(len(leaves)), key=lambda i: rank[pieces[leaves[i][0]][0].name])
    reader = WeightReader(fill, tuple(order))
    return held_reader(
        abstract,
        dense,
        reader,
        None if quantized is None else CheckpointRows(quantized, with_head(specs), held_weights(abstract)),
    )


def check_names(source: TensorSource, specs: Collection[ParamSpec], ignored: Callable[[str], bool]) -> set[str]:
    """Return the names of the tensors that the parameters are made of.

    Raises `ConfigError` unless every part has a readable tensor of a fitting shape, and every tensor its parts.
    """
    infos = source.infos
    by_name: dict[str, list[TensorPart]] = defaultdict(list)
    spec_of = {}
    integers = set()
    for spec in specs:
        for part in spec.parts:
            by_name[part.name].append(part)
            spec_of[part.name] = spec
            if spec.dtype.kind in "iu":
                integers.add(part.name)
    unused = {name for spec in specs for name in spec.unused}
    prefixes = tuple(name for name in unused if name.endswith("."))
    used = sorted(name for name in by_name if name in infos)
    mismatches = [
        ("missing", sorted(name for name in by_name if name not in infos)),
        (
            "left over (this model has no place for them)",
            sorted(
                n
                for n in infos
                if n not in by_name and n not in unused and not n.startswith(prefixes) and not ignored(n)
            ),
        ),
        (
            "of the wrong shape",
            [
                f"{name} {list(infos[name].shape)} instead of {_file_shape(infos[name], by_name[name], spec_of[name])}"
                for name in used
                if not _fits(infos[name], by_name[name])
            ],
        ),
        (
            "not readable",
            [
                f"{name} ({infos[name].unreadable})"
                for name in used
                if infos[name].unreadable and not (name in integers and infos[name].stored_type in INTEGERS)
            ],
        ),
    ]
    advice = "Check that config and weights belong together and that the download is complete"
    raise_mismatch(source.description, mismatches, advice)
    return set(by_name)


def _file_shape(found: TensorInfo, parts: Sequence[TensorPart], spec: ParamSpec) -> list[int]:
    """Return the shape that a tensor of these parts has in a file, with the dimensions of 1 that the one there has.

    If it is only some rows that are needed, return that of a tensor with the fewest rows.

    All outputs are one dimension there, as are all inputs. A tensor of all experts has the experts as its first
    dimension; one with the weights of all heads has them one after the other. Without inputs it is a vector, unless it
    is a table.
    """
    whole = [part for part in parts if not part.some_rows]
    if not whole:
        return [max(part.first_row + part.shape[0] for part in parts), *parts[0].shape[1:]]
    shapes = [_joined(part, spec, quantized=found.quantized) for part in whole]
    shape = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
    for axis, size in enumerate(found.shape):
        if size == 1 and len(shape) < len(found.shape):
            shape.insert(axis, 1)
    return shape


def _joined(part: TensorPart, spec: ParamSpec, *, quantized: bool) -> list[int]:
    view = part.quantized_view if quantized else part.view
    shape = viewed_shape(part, quantized=quantized)
    if spec.by_head:
        return [math.prod(shape[:-1]), shape[-1]]
    axes = tuple(range(len(shape))) if view is None else view.axes
    inputs = axes[len(axes) - (1 if spec.axes[0] == "vocab" else spec.inputs) :]
    has_experts = shape[0] == spec.num_experts
    kinds = itertools.groupby(range(len(shape)), lambda axis: (has_experts and axis == 0, axis in inputs))
    return [math.prod(shape[axis] for axis in dims) for _, dims in kinds]


def _fits(info: TensorInfo, parts: Sequence[TensorPart]) -> bool:
    """Return whether a tensor has the rows of all its parts; a transposed tensor doesn't."""
    stored = info.shape
    inner = math.prod(stored[1:])
    whole = [part for part in parts if not part.some_rows]
    sizes = [math.prod(part.shape) for part in whole]
    return (
        (not whole or sum(sizes) == math.prod(stored))
        and all(
            size % inner == 0
            and _split_points((size // inner, *stored[1:]))
            <= _split_points(viewed_shape(part, quantized=info.quantized))
            for size, part in zip(sizes, whole)
        )
        and all(
            part.shape[1:] == stored[1:] and part.first_row + part.shape[0] <= stored[0]
            for part in parts
            if part.some_rows
        )
    )


def _assert_covered(shapes: Mapping[Path, tuple[int, ...]], pieces: Mapping[Path, Sequence[TensorPart]]) -> None:
    """Assert that the parts fill every parameter: the model family's code decides them, not a user's files."""
    for path, shape in shapes.items():
        written = sum(math.prod(part.shape) for part in pieces.get(path, ()))
        assert written == math.prod(shape), f"{dotted(path)} {shape}: {written} elements have a tensor"
        for part in pieces[path]:
            fits = all(i + n <= size for i, n, size in zip(part.index, part.shape, shape, strict=True))
            assert fits, f"{part.name} at {part.index} exceeds {dotted(path)} {shape}"
    assert pieces.keys() <= shapes.keys(), sorted(map(dotted, pieces.keys() - shapes.keys()))


def _split_points(shape: tuple[int, ...]) -> set[int]:
    return {math.prod(shape[:i]) for i in range(len(shape) + 1)} | {1}
