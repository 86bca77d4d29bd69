"""From host buffers to jax arrays: each shard of a parameter is filled by a caller's function and put on its devices.

Owns what a process reads and holds while it loads: the shards of its own devices and no others, each once however many
devices share it, at most two at a time (one a thread) besides those that have become jax arrays. On a CPU the array is
the buffer itself (jax takes memory aligned to 64 bytes as it is), so nothing is held twice.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxserve.params import ParamSpec, Path, Window, path_of

Bounds = tuple[tuple[int, int], ...]
Fill = Callable[[Path, ParamSpec, Window, np.ndarray[Any, Any]], None]

THREADS = 2
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class WeightReader:
    """Reads the parameters of a tree. `fill(path, spec, window, out)` writes a window of what is stored of one
    (`ParamSpec.windows`) into `out`, from any thread; `order` is that in which its parameters are best read."""

    fill: Fill
    order: tuple[int, ...]


def flatten(abstract: Any) -> tuple[list[tuple[Path, ParamSpec]], Any]:
    """The parameters of a tree with their paths (attribute names, keys and list indices), and the tree's structure."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    return [(path_of(keys), spec) for keys, spec in leaves], structure


def build(abstract: Any, shardings: Any, reader: WeightReader) -> Any:
    """A tree of jax arrays like `abstract`, made of the shards of this process' devices."""
    leaves, structure = flatten(abstract)
    placed = jax.tree_util.tree_leaves(shardings)
    assert len(placed) == len(leaves), (len(placed), len(leaves))
    assert sorted(reader.order) == list(range(len(leaves)))

    # Before threads ask: jax crashed where two at once were the first to (0.11.2, several processes)
    devices = [_devices(spec, sharding) for (_, spec), sharding in zip(leaves, placed)]

    def make(i: int) -> jax.Array:
        return _make(*leaves[i], placed[i], devices[i], reader.fill)

    arrays: list[jax.Array | None] = [None] * len(leaves)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="weights") as pool:
        for i, array in zip(reader.order, pool.map(make, reader.order)):
            arrays[i] = array
    return jax.tree_util.tree_unflatten(structure, arrays)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An array that is not filled yet, in memory that jax takes as it is."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _devices(spec: ParamSpec, sharding: jax.sharding.Sharding) -> dict[Bounds, list[jax.Device]]:
    """This process' devices by what they hold of a parameter."""
    found: dict[Bounds, list[jax.Device]] = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
        found[tuple(part.indices(size)[:2] for part, size in zip(index or (), spec.shape, strict=True))].append(device)
    return found


def _make(
    path: Path, spec: ParamSpec, sharding: jax.sharding.Sharding, devices: dict[Bounds, list[jax.Device]], fill: Fill
) -> jax.Array:
    arrays = []
    for bounds, sharers in devices.items():
        index = tuple(slice(*bound) for bound in bounds)
        buffer = aligned_empty(tuple(stop - start for start, stop in bounds), spec.dtype)
        if spec.padding:
            buffer.fill(0)
        for stored, inside in spec.windows(index):
            fill(path, spec, stored, buffer[inside])
        arrays += jax.block_until_ready([jax.device_put(buffer, device) for device in sharers])
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, arrays, dtype=spec.dtype)
