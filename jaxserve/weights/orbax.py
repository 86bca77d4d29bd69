"""Reads the checkpoint in a folder of `jaxserve convert`: any window of any parameter, so any mesh.

Orbax wrote it, and it is read with TensorStore, as Orbax itself does: a shard may be made of several windows of what is
stored (replicas of a KV head, a padded vocabulary), which Orbax' own restore doesn't know, and processes need no word
with each other. Only the chunks that a window touches are read; several at a time, by TensorStore's threads.
"""

from __future__ import annotations

import functools
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import tensorstore

from jaxserve.errors import ConfigError
from jaxserve.params import ParamSpec, Path, Window, dotted
from jaxserve.weights.arrays import WeightReader, flatten
from jaxserve.weights.faults import refuse_misfit
from jaxserve.weights.manifest import PARAMS, Manifest, read_manifest

_NODE_CACHE_BYTES = 64 << 20
_FILE_MODE = "memmap"
"""Files in the page cache are read in three quarters of the time that they take without (`benchmarks/load.py`)."""


class OrbaxCheckpoint:
    """A checkpoint that is open for reading. Raises `ConfigError` where its folder is not whole."""

    def __init__(self, folder: FilePath) -> None:
        self._folder = folder
        self._manifest = read_manifest(folder)
        # Where chunks lie is looked up for every window; the chunks themselves are never cached
        context = tensorstore.Context({"cache_pool#nodes": {"total_bytes_limit": _NODE_CACHE_BYTES}})
        self._open = functools.cache(functools.partial(_open, folder, context))

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
        try:
            stored = self._open(name)[window].translate_to[(0,) * out.ndim]
            tensorstore.array(out).write(stored).result()
        except ValueError as error:  # what TensorStore makes of a missing chunk and of a file that can't be read
            raise ConfigError(
                f"{self._folder}: {name} can't be read ({error}); copy the folder again from where it was made"
            ) from error


def _open(folder: FilePath, context: tensorstore.Context, name: str) -> Any:
    spec = {
        "driver": "zarr",
        "kvstore": {
            "driver": "ocdbt",
            "base": {
                "driver": "file",
                "path": f"{(folder / PARAMS).resolve()}/",
                "file_io_mode": {"mode": _FILE_MODE},
            },
            "path": f"{name}/",
            "cache_pool": "cache_pool#nodes",
        },
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
        "fill_missing_data_reads": False,
    }
    return tensorstore.open(spec, context=context, open=True, read=True).result()


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
