"""Checks a checkpoint against a model's parameters, then streams it into them.

Owns the match of names and shapes: nothing is read before every tensor has its place and every parameter its tensors.
Parameters are made one after the other in the file's order, the pieces of a fused one (qkv, gate and up) written
straight into its buffer, so no tensor is held besides the parameter it belongs to.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.params import ParamSpec, Placement
from jaxserve.weights.arrays import Path, build, dotted, flatten
from jaxserve.weights.source import TensorSource

_log = logging.getLogger(__name__)
_NAMES_SHOWN = 10


def load_params(
    abstract: Any,
    source: TensorSource,
    placements: Mapping[str, Placement],
    shardings: Any,
    *,
    ignored: Callable[[str], bool] = lambda name: False,
) -> Any:
    """The parameters of `abstract`, filled from `source`, as jax arrays in the specs' types on `shardings`.

    `ignored` names what the checkpoint may hold without a use. Raises `ConfigError` naming the tensors that are
    missing, left over, of the wrong shape, or of a type that can't be read.
    """
    leaves, _ = flatten(abstract)
    specs = dict(leaves)
    _check_names(source, placements, ignored)
    pieces: dict[Path, list[tuple[str, Placement]]] = defaultdict(list)
    position: dict[Path, int] = {}
    for i, name in enumerate(source.infos):
        if name in placements:
            placement = placements[name]
            pieces[placement.path].append((name, placement))
            position.setdefault(placement.path, i)
    _check_cover(specs, pieces)

    def fill(path: Path, spec: ParamSpec, buffer: np.ndarray[Any, Any]) -> None:
        for name, placement in pieces[path]:
            window = tuple(slice(i, i + n) for i, n in zip(placement.index, placement.shape))
            _read(source, name, buffer[window])

    paths = [path for path, _ in leaves]
    return build(abstract, shardings, fill, order=sorted(range(len(paths)), key=lambda i: position[paths[i]]))


def _read(source: TensorSource, name: str, window: np.ndarray[Any, Any], start: int = 0) -> int:
    """Fills `window` of a parameter with the tensor's rows from `start` on, and returns the row after the last."""
    row_shape = source.infos[name].shape[1:]
    rows = window.size // math.prod(row_shape)
    try:
        view = np.reshape(window, (rows, *row_shape), copy=False)
    except ValueError:  # the window lies scattered in its parameter, and no strides give it the tensor's shape
        if rows > 1:
            for part in window:
                start = _read(source, name, part, start)
            return start
        row = np.empty((1, *row_shape), window.dtype)
        source.read_rows(name, start, row)
        window[...] = row.reshape(window.shape)
    else:
        source.read_rows(name, start, view)
    return start + rows


def _check_names(source: TensorSource, placements: Mapping[str, Placement], ignored: Callable[[str], bool]) -> None:
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
    parts = [f"{_count(names)} {what}: {_listed(names)}" for what, names in faults if names]
    if parts:
        raise ConfigError(
            f"{source.description} doesn't fit the model its config describes: {'; '.join(parts)}. "
            "Check that config and weights belong together and that the download is complete"
        )
    skipped = [name for name in infos if name not in placements]
    if skipped:
        _log.info("weights: %d tensors of the checkpoint have no use here: %s", len(skipped), _listed(sorted(skipped)))


def _check_cover(specs: Mapping[Path, ParamSpec], pieces: Mapping[Path, list[tuple[str, Placement]]]) -> None:
    """Placements are a model's own code: one that leaves part of a parameter unwritten is our fault, not a person's."""
    for path, spec in specs.items():
        written = sum(math.prod(placement.shape) for _, placement in pieces.get(path, ()))
        shape = spec.stored_shape
        assert written == math.prod(shape), f"{dotted(path)} {shape}: {written} elements are placed"
        for name, placement in pieces[path]:
            fits = all(i + n <= size for i, n, size in zip(placement.index, placement.shape, shape, strict=True))
            assert fits, f"{name} at {placement.index} leaves {dotted(path)} {shape}"
    assert pieces.keys() <= specs.keys(), sorted(map(dotted, pieces.keys() - specs.keys()))


def _same_layout(stored: tuple[int, ...], placed: tuple[int, ...]) -> bool:
    """Whether one shape only splits or merges neighbouring dimensions of the other; a transposed tensor doesn't."""
    a, b = _borders(stored), _borders(placed)
    return math.prod(stored) == math.prod(placed) and (a <= b or b <= a)


def _borders(shape: tuple[int, ...]) -> set[int]:
    return {math.prod(shape[:i]) for i in range(len(shape) + 1)} | {1}


def _count(names: list[str]) -> str:
    return "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
