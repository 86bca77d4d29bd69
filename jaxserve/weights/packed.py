"""Fills packed weights: reads parts of a checkpoint that fit in a core's cache, and packs them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.params import ParamSpec, Path, TensorPart, Window, dotted
from jaxserve.quant import packed_weights
from jaxserve.weights.arrays import WeightReader, flatten
from jaxserve.weights.source import BLOCK_ELEMENTS, BlockSource, TensorInfo
from pallas_kernels.quantized_matmul import BLOCK, BLOCK_DTYPE, STRIP, PackedWeight, pack_blocks, pack_dense

Read = Callable[[Window, np.ndarray[Any, Any]], None]


class BlockwiseSource:
    """The quantized matrices of a checkpoint, whose last dimension counts blocks of 32 weights as one element."""

    def __init__(self, source: BlockSource) -> None:
        self._source = source
        self._infos = {name: _blockwise_info(info) for name, info in source.infos.items()}

    @property
    def description(self) -> str:
        return self._source.description

    @property
    def infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def read(self, name: str, window: Window, out: np.ndarray[Any, Any]) -> None:
        """See `BlockSource.read_blocks`."""
        self._source.read_blocks(name, window, out)


def to_blockwise(part: TensorPart) -> TensorPart:
    """Return a part of a tensor that is read as blocks."""
    *shape, inner = part.shape
    *index, start = part.index
    assert (inner % BLOCK, start % BLOCK) == (0, 0), part
    return dataclasses.replace(part, shape=(*shape, inner // BLOCK), index=(*index, start // BLOCK))


def fill_packed(weight: PackedWeight, read: Read, out: np.ndarray[Any, Any]) -> None:
    """Write the bytes of a whole weight into `out`.

    `read` writes a window of the weight into an array: of bfloat16 for 16 bits, else of `BLOCK_DTYPE`, where the last
    dimension counts blocks.
    """
    shape, dtype = weight.shape, np.dtype(jnp.bfloat16)
    if weight.bits != 16:
        shape, dtype = (*shape[:-1], shape[-1] // BLOCK), BLOCK_DTYPE
    split = next(i for i in range(len(shape)) if math.prod(shape[:i]) == len(out) * STRIP)
    most = BLOCK_ELEMENTS // math.prod(weight.shape[split:])
    inputs = math.prod(shape[split:])
    done = 0
    for window in _strip_windows(shape[:split], most):
        outputs = [w.stop - w.start for w in window]
        rows = np.empty((math.prod(outputs), inputs), dtype)
        read((*window, *(slice(0, n) for n in shape[split:])), rows.reshape(*outputs, *shape[split:], copy=False))
        strips = out[done : done + len(rows) // STRIP]
        done += len(strips)
        if weight.bits == 16:
            pack_dense(rows, strips)
        else:
            pack_blocks(rows, weight.bits, strips)
    assert done == len(out), weight


def packing_reader(abstract: Any, dense: Any, reader: WeightReader) -> WeightReader:
    """Return a reader of the parameters of `abstract`, which packs its 16-bit weights.

    `reader` reads the parameters of `dense`, the same tree without packed weights.
    """
    leaves, _ = flatten(abstract)
    packed = packed_weights(abstract)
    specs = dict(flatten(dense)[0])
    rank = {path: reader.order.index(i) for i, path in enumerate(specs)}

    def fill(path: Path, spec: ParamSpec, window: Window, out: np.ndarray[Any, Any]) -> None:
        owner = path[:-1]
        if owner not in packed:
            reader.fill(path, spec, window, out)
            return
        assert packed[owner].bits == 16, dotted(owner)
        fill_packed(packed[owner], functools.partial(reader.fill, owner, specs[owner]), out)

    owners = [path[:-1] if path[:-1] in packed else path for path, _ in leaves]
    return WeightReader(fill, tuple(sorted(range(len(owners)), key=lambda i: rank[owners[i]])))


def _strip_windows(shape: tuple[int, ...], most: int) -> Iterator[Window]:
    """Yield windows of whole strips that together cover outputs of `shape`, in order.

    Each has about `most` outputs, and at least one strip.
    """
    axis = next(i for i in range(len(shape)) if i == len(shape) - 1 or math.prod(shape[i + 1 :]) <= most)
    while math.prod(shape[axis:]) % STRIP:
        axis -= 1
    inner = math.prod(shape[axis + 1 :])
    unit = STRIP // math.gcd(inner, STRIP)
    step = max(1, most // inner // unit) * unit
    for outer in np.ndindex(shape[:axis]):
        for start in range(0, shape[axis], step):
            whole = (slice(0, length) for length in shape[axis + 1 :])
            yield *(slice(i, i + 1) for i in outer), slice(start, min(start + step, shape[axis])), *whole


def _blockwise_info(info: TensorInfo) -> TensorInfo:
    *shape, inner = info.shape
    return dataclasses.replace(info, shape=(*shape, inner // BLOCK))
