"""Reads the checkpoint in a folder of `jaxserve convert`: any window of any parameter, so for any mesh.

Orbax wrote it as uncompressed zarr arrays: each chunk is a file that holds nothing but the numbers. They are read
directly into the parameter, without Orbax or TensorStore, which take longer to import than a small model takes to read.
A shard may be made of several stored windows (replicas of a KV head, a padded vocabulary). Only what a window covers is
read, and processes need no communication.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import weakref
from pathlib import Path as FilePath
from typing import Any

import ml_dtypes  # noqa: F401  its import makes bfloat16 known to numpy by name
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.host import read_at
from jaxserve.params import ParamSpec, Path, Window, dotted
from jaxserve.weights.arrays import WeightReader, flatten
from jaxserve.weights.finite import check_finite
from jaxserve.weights.manifest import PARAMS_FOLDER, CheckpointManifest, read_manifest
from jaxserve.weights.mismatch import raise_mismatch

_OPEN_CHUNKS = 256
"""Chunk files kept open: one window of a parameter may touch a few rows of every chunk."""
_BLOCK_BYTES = 1 << 18
"""Bytes read at a time where only part of each row is needed: small enough to stay in a core's cache."""


class OrbaxCheckpoint:
    """A checkpoint that is open for reading. Raises `ConfigError` if its folder is incomplete."""

    def __init__(self, folder: FilePath) -> None:
        self._folder = folder
        self._manifest = read_manifest(folder)
        self._open_chunk = functools.lru_cache(_OPEN_CHUNKS)(_ChunkFile)

    def reader(self, abstract: Any) -> WeightReader:
        """Return a reader of the parameters of `abstract`, in the order in which they were written.

        Raises `ConfigError` naming the parameters that are missing, left over, of the wrong shape, or of another type.
        """
        leaves, _ = flatten(abstract)
        _check_parameters(self._folder, self._manifest, {dotted(path): spec for path, spec in leaves})
        position = {name: i for i, name in enumerate(self._manifest.parameters)}
        order = sorted(range(len(leaves)), key=lambda i: position[dotted(leaves[i][0])])
        return WeightReader(self._fill, tuple(order))

    def _fill(self, path: Path, spec: ParamSpec, window: Window, out: np.ndarray[Any, Any]) -> None:
        name = dotted(path)
        stored = self._manifest.parameters[name]
        # Copied as integers: numpy copies elements of types that it doesn't know itself one by one
        bits = out.view(f"u{out.itemsize}")
        touched = [range(part.start // size, -(-part.stop // size)) for part, size in zip(window, stored.chunks)]
        for index in itertools.product(*touched):
            corner = [i * size for i, size in zip(index, stored.chunks)]
            common = [
                (max(part.start, start), min(part.stop, start + size))
                for part, start, size in zip(window, corner, stored.chunks)
            ]
            wanted = tuple(slice(low - start, high - start) for (low, high), start in zip(common, corner))
            inside = tuple(slice(low - part.start, high - part.start) for (low, high), part in zip(common, window))
            file = self._folder / PARAMS_FOLDER / name / ".".join(map(str, index))
            try:
                self._open_chunk(file, stored.chunks).read(wanted, bits[inside])
            except OSError as error:
                raise ConfigError(
                    f"{file}: {name} can't be read ({error}); copy the folder again from where it was made"
                ) from error
        if out.dtype.kind not in "iu":
            check_finite(out, name, str(self._folder))


class _ChunkFile:
    """An open chunk file: an array of the chunk's shape, in row-major order. Raises `OSError`.

    The last chunk of an axis is padded to the full shape.
    """

    def __init__(self, path: FilePath, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def read(self, window: Window, out: np.ndarray[Any, Any]) -> None:
        """Write a window into `out`, an array of any strides of integers of the type's size. Raises `OSError`."""
        self._read(self._file, 0, self._shape, window, out)

    def _read(self, file: int, at: int, shape: tuple[int, ...], window: Window, out: np.ndarray[Any, Any]) -> None:
        """Write a window of the array of `shape` that begins at byte `at` of the file."""
        rows, *inner = window
        row_bytes = math.prod(shape[1:]) * out.itemsize
        if out.flags.c_contiguous and all(part == slice(0, size) for part, size in zip(inner, shape[1:])):
            _read_bytes(file, at + rows.start * row_bytes, out)
        elif row_bytes > _BLOCK_BYTES and inner:
            for row, into in zip(range(rows.start, rows.stop), out):
                self._read(file, at + row * row_bytes, shape[1:], tuple(inner), into)
        else:
            step = max(1, _BLOCK_BYTES // row_bytes)
            for first in range(rows.start, rows.stop, step):
                block = np.empty((min(step, rows.stop - first), *shape[1:]), out.dtype)
                _read_bytes(file, at + first * row_bytes, block)
                out[first - rows.start : first - rows.start + len(block)] = block[(slice(None), *inner)]


def _read_bytes(file: int, at: int, out: np.ndarray[Any, Any]) -> None:
    """Fill `out`, which is contiguous, from byte `at` on. Raises `OSError`, also if the file ends too early."""
    left = memoryview(out).cast("B")
    while left:
        count = read_at(file, left, at)
        if not count:
            raise OSError(f"the file ends at byte {at}")
        left, at = left[count:], at + count


def _check_parameters(folder: FilePath, manifest: CheckpointManifest, specs: dict[str, ParamSpec]) -> None:
    stored = manifest.parameters
    both = [name for name in stored if name in specs]
    shapes = {name: list(specs[name].stored_shape) for name in both}
    others = [name for name in both if stored[name].dtype != specs[name].dtype.name]
    dtypes = sorted({stored[name].dtype for name in others})
    wanted = sorted({specs[name].dtype.name for name in others})
    advice = "Check that config.json and the checkpoint belong together"
    if len(dtypes) == 1:
        advice = f"Start with --dtype {dtypes[0]}, or convert the model again with --dtype {wanted[0]}"
    raise_mismatch(
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
            (
                f"of another type than --dtype {' and '.join(wanted)}",
                [f"{name} ({stored[name].dtype})" for name in others],
            ),
        ],
        advice,
    )
