"""Writes parameters as an Orbax checkpoint: two are made at a time, and two more may be on their way out.

Owns how they lie there: in the model's own form, whatever mesh will read them, in chunks along the axis that shards are
split by, so that a shard lies together on disk. Not compressed, and each chunk a file of its own (no OCDBT): weights
hardly shrink, and files that are nothing but the numbers are read as fast as memory is copied.
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
from jaxserve.weights.arrays import THREADS, Fill, WeightReader, aligned_empty, flatten
from jaxserve.weights.manifest import PARAMS, StoredParameter

_PIECES = 16
_CHUNK_BYTES = (1 << 20, 64 << 20)
_RUN_BYTES = 1 << 10
"""Of a row that is cut, that lie side by side: what is shorter takes longer to put together than a shard saves."""


@dataclasses.dataclass(frozen=True)
class _Unread:
    """A parameter that is read when it is written."""

    path: Path
    spec: ParamSpec


class _UnreadHandler(type_handlers.NumpyHandler):  # type: ignore[misc]
    """Writes what numpy arrays would be, without having them all at once; anybody's Orbax restores them as such."""

    def __init__(self, fill: Fill, written: Callable[[int], None]) -> None:
        super().__init__()
        self._fill = fill
        self._written = written

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        for info in infos:
            await info.await_path_creation()
        with ThreadPoolExecutor(THREADS, thread_name_prefix="weights") as pool:
            for nbytes in pool.map(self._write, values, infos):
                self._written(nbytes)
        return []

    def _write(self, value: _Unread, info: Any) -> int:
        spec = value.spec
        array = aligned_empty(spec.stored_shape, spec.dtype)
        self._fill(value.path, spec, tuple(slice(0, length) for length in array.shape), array)
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
    folder: FilePath, abstract: Any, reader: WeightReader, written: Callable[[int], None]
) -> dict[str, StoredParameter]:
    """Write all of `abstract` into a new folder inside `folder`; `written` is told the bytes of each that is done.

    Returns what is there now. `abstract` is that of a model laid out for one shard. Raises `OSError` or `ValueError`
    where it can't be written.
    """
    leaves, _ = flatten(abstract)
    assert all(spec.stored_shape == spec.shape for _, spec in leaves)
    ordered = [leaves[i] for i in reader.order]
    handler = _UnreadHandler(reader.fill, written)
    # Orbax warns where it has no handler of arrays
    registry = type_handlers.create_type_handler_registry((jax.Array, type_handlers.ArrayHandler()), (_Unread, handler))
    checkpointer = ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=registry)
    )
    orbax_log = logging.getLogger("absl")
    orbax_log.addFilter(_is_news)
    try:
        checkpointer.save((folder / PARAMS).resolve(), args=ocp.args.PyTreeSave(_nested(ordered)))
    finally:
        orbax_log.removeFilter(_is_news)
    return {
        dotted(path): StoredParameter(spec.stored_shape, spec.dtype.name, chunk_shape(spec)) for path, spec in ordered
    }


def chunk_shape(spec: ParamSpec) -> tuple[int, ...]:
    """The shape of the chunks that a parameter is stored in: pieces of the axis that it is split by."""
    shape = list(spec.stored_shape)
    nbytes, (least, most) = math.prod(shape) * spec.dtype.itemsize, _CHUNK_BYTES
    split = [axis for axis, name in enumerate(spec.axes) if name is not None]
    axis = split[0] if split else 0
    row = math.prod(shape[axis:]) * spec.dtype.itemsize
    wanted = min(_PIECES, nbytes // least, row // _RUN_BYTES if axis else _PIECES) if split else 1
    pieces = 1
    while 2 * pieces <= wanted or nbytes > pieces * most:
        pieces *= 2  # as shards mostly are
    shape[axis] = -(-shape[axis] // pieces)
    return tuple(shape)


def _is_news(record: logging.LogRecord) -> bool:
    """Orbax warns that it finds no OCDBT files to merge, also where it was told to write none."""
    return "OCDBT" not in record.getMessage()


def _nested(leaves: Sequence[tuple[Path, ParamSpec]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, spec in leaves:
        *outer, last = map(str, path)
        inside = tree
        for name in outer:
            inside = inside.setdefault(name, {})
        inside[last] = _Unread(path, spec)
    return tree
