"""What of an array over the whole mesh the devices of this process hold, and the way there and back.

A program over several processes must be given arrays: jax would compare a numpy array across processes at every call.
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
    """Whether devices of other processes belong to it."""
    return bool(mesh.is_multi_process)


@dataclasses.dataclass(frozen=True)
class LocalPart:
    """A box of an array of `spec`'s shape: `first` is where it begins, `shape` how large it is."""

    spec: ArraySpec
    sharding: NamedSharding
    first: tuple[int, ...]
    shape: tuple[int, ...]

    def put(self, local: np.ndarray) -> jax.Array:
        """The whole array, of which this process has `local`."""
        windows = self.sharding.addressable_devices_indices_map(self.spec.shape)
        parts = [jax.device_put(local[self._inside(index)], device) for device, index in windows.items()]
        return jax.make_array_from_single_device_arrays(self.spec.shape, self.sharding, parts)

    def put_own(self, whole: np.ndarray) -> jax.Array:
        """The same, from an array that is whole in every process."""
        return self.put(whole[tuple(slice(at, at + size) for at, size in zip(self.first, self.shape))])

    def get(self, array: jax.Array) -> np.ndarray:
        """What this process has of `array`, as whole numbers of its dtype's size: numpy copies those fast."""
        bits = bits_of(self.spec.dtype)
        local = np.empty(self.shape, bits)
        for shard in array.addressable_shards:
            local[self._inside(shard.index)] = np.asarray(shard.data).view(bits)
        return local

    def _inside(self, index: Any) -> tuple[slice, ...]:
        bounds = [part.indices(size)[:2] for part, size in zip(index, self.spec.shape)]
        return tuple(slice(start - at, stop - at) for (start, stop), at in zip(bounds, self.first))


def local_part(mesh: Mesh, spec: ArraySpec) -> LocalPart:
    """The part of this process: a box, as each has whole ranks or an equal part of one."""
    sharding = NamedSharding(mesh, partition(spec.axes))
    windows = sharding.addressable_devices_indices_map(spec.shape).values()
    bounds = [[part.indices(size)[:2] for part, size in zip(index or (), spec.shape)] for index in windows]
    first = tuple(min(start for start, _ in along) for along in zip(*bounds))
    last = tuple(max(stop for _, stop in along) for along in zip(*bounds))
    return LocalPart(spec, sharding, first, tuple(stop - start for start, stop in zip(first, last)))


def bits_of(dtype: np.dtype) -> np.dtype:
    """Numpy copies bfloat16 a number at a time, a hundred times slower than whole numbers of that size."""
    return np.dtype(f"u{dtype.itemsize}")
