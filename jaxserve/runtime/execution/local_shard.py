"""The part of a global array that the devices of this process hold, and copies between it and numpy arrays.

A program that spans processes must take jax arrays: jax would compare a numpy array across processes at every call.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxserve.runtime.devices.mesh import partition
from jaxserve.runtime.step.state import ArraySpec


def spans_processes(mesh: Mesh) -> bool:
    """Return whether devices of other processes belong to the mesh."""
    return bool(mesh.is_multi_process)


@dataclasses.dataclass(frozen=True)
class LocalShard:
    """The box of a global array, described by `spec`, that is local; it starts at `first` and has `shape`."""

    spec: ArraySpec
    sharding: NamedSharding
    first: tuple[int, ...]
    shape: tuple[int, ...]

    def put(self, local: np.ndarray) -> jax.Array:
        """Return the global array, of which `local` is the part of this process."""
        windows = self.sharding.addressable_devices_indices_map(self.spec.shape)
        parts = [jax.device_put(local[self._inside(index)], device) for device, index in windows.items()]
        return jax.make_array_from_single_device_arrays(self.spec.shape, self.sharding, parts)

    def put_from_whole(self, whole: np.ndarray) -> jax.Array:
        """Return the global array from its whole content, which every process has."""
        return self.put(whole[tuple(slice(at, at + size) for at, size in zip(self.first, self.shape))])

    def get(self, array: jax.Array) -> np.ndarray:
        """Return the local part of `array`, its bits as unsigned integers (see `bits_of`)."""
        bits = bits_of(self.spec.dtype)
        local = np.empty(self.shape, bits)
        for shard in array.addressable_shards:
            local[self._inside(shard.index)] = np.asarray(shard.data).view(bits)
        return local

    def _inside(self, index: Any) -> tuple[slice, ...]:
        bounds = [part.indices(size)[:2] for part, size in zip(index, self.spec.shape)]
        return tuple(slice(start - at, stop - at) for (start, stop), at in zip(bounds, self.first))


def local_shard(mesh: Mesh, spec: ArraySpec) -> LocalShard:
    """Return the local part: it is a box, as each process has whole ranks or an equal part of one."""
    sharding = NamedSharding(mesh, partition(spec.axes))
    windows = sharding.addressable_devices_indices_map(spec.shape).values()
    bounds = [[part.indices(size)[:2] for part, size in zip(index or (), spec.shape)] for index in windows]
    first = tuple(min(start for start, _ in along) for along in zip(*bounds))
    last = tuple(max(stop for _, stop in along) for along in zip(*bounds))
    return LocalShard(spec, sharding, first, tuple(stop - start for start, stop in zip(first, last)))


def bits_of(dtype: np.dtype) -> np.dtype:
    """Return the unsigned integer dtype of the same size: numpy copies it a hundred times faster than bfloat16."""
    return np.dtype(f"u{dtype.itemsize}")
