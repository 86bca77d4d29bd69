"""Builds jax arrays from host buffers: a reader fills each shard of a parameter, and the shard goes to its devices.

This module decides how much a process reads and holds while it loads. It reads only the shards of its own devices, and
each shard once, even if several devices share it. Each thread holds one shard until it is a jax array. On a CPU the
array is the buffer itself (jax uses memory aligned to 64 bytes without a copy), so nothing is held twice.
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
    """Reads the parameters of a tree.

    `fill(path, spec, window, out)` writes one window of a stored parameter (see `ParamSpec.windows`) into `out`; any
    thread may call it. `order` lists the indices of the tree's leaves in the order that reads fastest. `threads` call
    `fill` at once, each for a parameter of its own.
    """

    fill: Fill
    order: tuple[int, ...]
    threads: int = THREADS

    def of_part(self, whole: Any, part: Any) -> WeightReader:
        """Return a reader of a tree that has only some of the parameters of the `whole` one."""
        paths = [path for path, _ in flatten(whole)[0]]
        places = {path: i for i, (path, _) in enumerate(flatten(part)[0])}
        return dataclasses.replace(self, order=tuple(places[paths[i]] for i in self.order if paths[i] in places))


def flatten(abstract: Any) -> tuple[list[tuple[Path, ParamSpec]], Any]:
    """Return a tree's parameters with their paths (attribute names, keys and list indices), and its structure."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    return [(path_of(keys), spec) for keys, spec in leaves], structure


def build_params(abstract: Any, shardings: Any, reader: WeightReader) -> Any:
    """Return a tree of jax arrays like `abstract`, made of the shards of this process's devices."""
    leaves, structure = flatten(abstract)
    placed = jax.tree_util.tree_leaves(shardings)
    assert len(placed) == len(leaves), (len(placed), len(leaves))
    assert sorted(reader.order) == list(range(len(leaves)))

    # This is computed before the threads start: with several processes, jax 0.11.2 crashed if two threads made the
    # first call at once
    devices = [_devices_by_bounds(spec, sharding) for (_, spec), sharding in zip(leaves, placed)]

    def build(i: int) -> jax.Array:
        return _build_array(*leaves[i], placed[i], devices[i], reader.fill)

    arrays: list[jax.Array | None] = [None] * len(leaves)
    with ThreadPoolExecutor(reader.threads, thread_name_prefix="weights") as pool:
        for i, array in zip(reader.order, pool.map(build, reader.order)):
            arrays[i] = array
    return jax.tree_util.tree_unflatten(structure, arrays)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an uninitialized array in memory that jax uses without a copy."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _devices_by_bounds(spec: ParamSpec, sharding: jax.sharding.Sharding) -> dict[Bounds, list[jax.Device]]:
    """Group this process's devices by the part of the parameter that they hold."""
    found: dict[Bounds, list[jax.Device]] = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
        found[tuple(part.indices(size)[:2] for part, size in zip(index or (), spec.shape, strict=True))].append(device)
    return found


def _build_array(
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
