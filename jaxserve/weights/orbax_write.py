"""Writes parameters as an Orbax checkpoint. Two are read at a time (more if they are quantized), while as many are
written.

This module owns their layout on disk. It doesn't depend on a mesh: parameters are cut into chunks along the axis that
shards split, so that a shard is contiguous. Nothing is compressed and each chunk is a file of its own (no OCDBT):
weights hardly shrink, and files that hold nothing but numbers are read as fast as memory is copied.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path as FilePath
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint import type_handlers

from jaxserve.params import ParamSpec, Path, dotted
from jaxserve.weights.arrays import WeightReader, aligned_empty, flatten
from jaxserve.weights.manifest import PARAMS_FOLDER, StoredParameter

_MAX_PIECES = 16
_CHUNK_BYTES = (1 << 20, 64 << 20)
_MIN_RUN_BYTES = 1 << 10
"""The least contiguous bytes of a row that is split: reading shorter pieces costs more than a shard saves."""


@dataclasses.dataclass(frozen=True)
class _LazyParameter:
    """A parameter that is read only when it is written."""

    path: Path
    spec: ParamSpec


class _LazyHandler(type_handlers.NumpyHandler):  # type: ignore[misc]
    """Writes each parameter as a numpy array, without holding all of them at once; any Orbax can restore them."""

    def __init__(self, reader: WeightReader, on_written: Callable[[int], None]) -> None:
        super().__init__()
        self._reader = reader
        self._on_written = on_written

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        for info in infos:
            await info.await_path_creation()
        with ThreadPoolExecutor(self._reader.threads, thread_name_prefix="weights") as pool:
            for nbytes in pool.map(self._write, values, infos):
                self._on_written(nbytes)
        return []

    def _write(self, value: _LazyParameter, info: Any) -> int:
        spec = value.spec
        array = aligned_empty(spec.stored_shape, spec.dtype)
        self._reader.fill(value.path, spec, tuple(slice(0, length) for length in array.shape), array)
        where = type_handlers.get_json_tspec_write(
            info,
            use_ocdbt=False,
            global_shape=array.shape,
            local_shape=chunk_shape(spec),
            dtype=array.dtype,
            process_index=0,
        )
        where["store_data_equal_to_fill_value"] = True
        store = tensorstore.open(where, create=True, open=True, context=info.ts_context).result()
        store.write(array, can_reference_source_data_indefinitely=True).result()
        return array.nbytes


def write_checkpoint(
    folder: FilePath, abstract: Any, reader: WeightReader, on_written: Callable[[int], None]
) -> dict[str, StoredParameter]:
    """Write all parameters of `abstract` into a new folder inside `folder`, and return what was stored.

    `abstract` must be laid out for one shard. Calls `on_written` with the size in bytes of each parameter that is done.
    Raises `OSError` or `ValueError` if it can't be written.
    """
    leaves, _ = flatten(abstract)
    assert all(spec.kv_replicas == 1 for _, spec in leaves)
    ordered = [leaves[i] for i in reader.order]
    handler = _LazyHandler(reader, on_written)
    # Orbax warns if there is no handler for jax arrays
    registry = type_handlers.create_type_handler_registry(
        (jax.Array, type_handlers.ArrayHandler()), (_LazyParameter, handler)
    )
    checkpointer = ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=registry)
    )
    orbax_log = logging.getLogger("absl")
    orbax_log.addFilter(_is_relevant)
    try:
        checkpointer.save((folder / PARAMS_FOLDER).resolve(), args=ocp.args.PyTreeSave(_nest(ordered)))
    finally:
        orbax_log.removeFilter(_is_relevant)
    return {
        dotted(path): StoredParameter(spec.stored_shape, spec.dtype.name, chunk_shape(spec)) for path, spec in ordered
    }


def chunk_shape(spec: ParamSpec) -> tuple[int, ...]:
    """Return the shape of the chunks that a parameter is stored in: pieces along the axis that it is split by."""
    shape = list(spec.stored_shape)
    nbytes, (least, most) = math.prod(shape) * spec.dtype.itemsize, _CHUNK_BYTES
    split = [axis for axis, name in enumerate(spec.axes) if name is not None]
    axis = split[0] if split else 0
    row = math.prod(shape[axis:]) * spec.dtype.itemsize
    wanted = min(_MAX_PIECES, nbytes // least, row // _MIN_RUN_BYTES if axis else _MAX_PIECES) if split else 1
    pieces = 1
    while 2 * pieces <= wanted or nbytes > pieces * most:
        pieces *= 2  # numbers of shards are mostly powers of two
    shape[axis] = -(-shape[axis] // pieces)
    return tuple(shape)


def _is_relevant(record: logging.LogRecord) -> bool:
    """Drop Orbax's warning that it finds no OCDBT files to merge: it was told to write none."""
    return "OCDBT" not in record.getMessage()


def _nest(leaves: Sequence[tuple[Path, ParamSpec]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, spec in leaves:
        *outer, last = map(str, path)
        inside = tree
        for name in outer:
            inside = inside.setdefault(name, {})
        inside[last] = _LazyParameter(path, spec)
    return tree
