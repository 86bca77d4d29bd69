"""Reads the checkpoint in a folder of `jaxserve convert`: any window of any parameter, so any mesh.

Orbax wrote it, as zarr arrays that are not compressed: each chunk is a file, and the file is the numbers. So they are
mapped into memory and copied from there, with neither Orbax nor TensorStore, which take longer to import than a small
model takes to read. A shard may be made of several windows of what is stored (replicas of a KV head, a padded
vocabulary), processes need no word with each other, and only what a window covers is read.
"""

from __future__ import annotations

import functools
import itertools
import math
import mmap
from pathlib import Path as FilePath
from typing import Any

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by name once this is imported
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.params import ParamSpec, Path, Window, dotted
from jaxserve.weights.arrays import WeightReader, flatten
from jaxserve.weights.faults import refuse_misfit
from jaxserve.weights.manifest import PARAMS, Manifest, StoredParameter, read_manifest

_OPEN_CHUNKS = 256
"""Chunks that stay mapped: a part of a parameter may be a few rows of all of its chunks."""


class OrbaxCheckpoint:
    """A checkpoint that is open for reading. Raises `ConfigError` where its folder is not whole."""

    def __init__(self, folder: FilePath) -> None:
        self._folder = folder
        self._manifest = read_manifest(folder)
        self._chunk = functools.lru_cache(_OPEN_CHUNKS)(functools.partial(_chunk, folder))

    def reader(self, abstract: Any) -> WeightReader:
        """What reads the parameters of `abstract`, in the order they were written in.

        Raises `ConfigError` naming those that are missing, left over, of the wrong shape, or of another type.
        """
        leaves, _ = flatten(abstract)
        _check(self._folder, self._manifest, {dotted(path): spec for path, spec in leaves})
        position = {name: i for i, name in enumerate(self._manifest.parameters)}
        order = sorted(range(len(leaves)), key=lambda i: position[dotted(leaves[i][0])])
        return WeightReader(self._fill, tuple(order))

    def _fill(self, path: Path, spec: ParamSpec, window: Window, out: np.ndarray[Any, Any]) -> None:
        name = dotted(path)
        stored = self._manifest.parameters[name]
        # As whole numbers: numpy copies types that it doesn't know itself one by one
        bits = out.view(f"u{out.itemsize}")
        touched = [range(part.start // size, -(-part.stop // size)) for part, size in zip(window, stored.chunks)]
        for index in itertools.product(*touched):
            chunk = self._chunk(name, stored, index)
            corner = [i * size for i, size in zip(index, stored.chunks)]
            common = [
                (max(part.start, start), min(part.stop, start + size))
                for part, start, size in zip(window, corner, stored.chunks)
            ]
            inside = tuple(slice(low - part.start, high - part.start) for (low, high), part in zip(common, window))
            bits[inside] = chunk[tuple(slice(low - start, high - start) for (low, high), start in zip(common, corner))]


def _chunk(folder: FilePath, name: str, stored: StoredParameter, index: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A chunk, as whole numbers of its type's size; the last ones of an axis are filled up to the size of all."""
    path = folder / PARAMS / name / ".".join(map(str, index))
    itemsize = np.dtype(stored.dtype).itemsize
    nbytes = math.prod(stored.chunks) * itemsize
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # the latter where the file is shorter
        raise ConfigError(
            f"{path}: {name} can't be read ({error}); copy the folder again from where it was made"
        ) from error
    if hasattr(mmap, "MADV_WILLNEED"):
        mapped.madvise(mmap.MADV_WILLNEED)
    return np.frombuffer(mapped, f"u{itemsize}").reshape(stored.chunks)


def _check(folder: FilePath, manifest: Manifest, specs: dict[str, ParamSpec]) -> None:
    stored = manifest.parameters
    both = [name for name in stored if name in specs]
    shapes = {name: list(specs[name].stored_shape) for name in both}
    dtypes = sorted({stored[name].dtype for name in both})
    wanted = sorted({spec.dtype.name for spec in specs.values()})
    others = [f"{name} ({stored[name].dtype})" for name in both if stored[name].dtype != specs[name].dtype.name]
    advice = "Check that config.json and the checkpoint belong together"
    if others and len(dtypes) == 1:
        advice = f"Start with --dtype {dtypes[0]}, or convert the model again with --dtype {wanted[0]}"
    refuse_misfit(
        str(folder),
        [
            ("missing", sorted(name for name in specs if name not in stored)),
            ("left over (this model has no place for them)", sorted(name for name in stored if name not in specs)),
            (
                "of the wrong shape",
                [
                    f"{name} {list(stored[name].shape)} instead of {shapes[name]}"
                    for name in both
                    if list(stored[name].shape) != shapes[name]
                ],
            ),
            (f"of another type than --dtype {' and '.join(wanted)}", others),
        ],
        advice,
    )
