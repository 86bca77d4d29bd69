"""The host memory of the hierarchical cache: one row per page, and the copies from the devices in flight.

It owns the memory and its size; the scheduler decides which slot holds which page. A row that is copied from a device
is stored once it has arrived, or when it is fetched. Rows are stored in the order they were sent, so the last row sent
to a slot stays.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import deque
from collections.abc import Sequence

import jax
import numpy as np
import psutil
from jax.sharding import Mesh

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.execution.local_shard import LocalShard, bits_of, local_shard, spans_processes
from jaxserve.runtime.step.state import ArraySpec

# Limits on the copies in flight: their rows take memory on the device that no plan counts.
_MAX_BYTES_IN_FLIGHT = 2**28
_MAX_TRANSFERS_IN_FLIGHT = 64
_GIGABYTE = 10**9


@dataclasses.dataclass(frozen=True)
class _Transfer:
    slots: list[list[int]]
    rows: Sequence[jax.Array]


class HostPool:
    """Holds `num_pages` rows for each rank, shaped as `specs` say (see `page_copies.row_specs`).

    Slots are numbered within a rank and given by rank. A slot takes memory once it is first used. If `mesh` spans
    several processes, each has a pool for the shards on its devices.
    """

    def __init__(self, specs: Sequence[ArraySpec], num_pages: int, mesh: Mesh | None = None) -> None:
        self.num_pages = num_pages
        self._shards: list[LocalShard] = []
        self._ranks = slice(None)
        if mesh is not None and spans_processes(mesh):
            self._shards = [local_shard(mesh, spec) for spec in specs]
            first = self._shards[0].first[0]
            self._ranks = slice(first, first + self._shards[0].shape[0])
            specs = [dataclasses.replace(shard.spec, shape=shard.shape) for shard in self._shards]
        self._specs = tuple(specs)
        self._arrays = [
            np.empty((spec.shape[0], num_pages, *spec.shape[2:]), bits_of(spec.dtype)) for spec in self._specs
        ]
        self._in_flight: deque[_Transfer] = deque()
        transfer_bytes = sum(spec.nbytes for spec in specs)
        # A group without layers has rows of no bytes.
        self._max_in_flight = max(1, min(_MAX_TRANSFERS_IN_FLIGHT, _MAX_BYTES_IN_FLIGHT // max(transfer_bytes, 1)))

    @property
    def pages_per_copy(self) -> int:
        """The number of pages that one call copies."""
        return self._specs[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that the pool takes once every slot was used."""
        return sum(array.nbytes for array in self._arrays)

    def store(self, slots: list[list[int]], rows: Sequence[jax.Array]) -> None:
        """Start to copy rows to the host: the first rows of each rank go into that rank's `slots`."""
        for row in rows:
            for shard in row.addressable_shards if self._shards else ():
                shard.data.copy_to_host_async()
            if not self._shards:
                row.copy_to_host_async()
        self._in_flight.append(_Transfer(slots[self._ranks], rows))
        while len(self._in_flight) > self._max_in_flight:
            self._store_oldest()

    def store_arrived(self) -> None:
        """Store the rows that have arrived, without waiting."""
        while self._in_flight and all(row.is_ready() for row in self._in_flight[0].rows):  # type: ignore[attr-defined]
            self._store_oldest()

    def fetch(self, slots: list[list[int]]) -> tuple[np.ndarray | jax.Array, ...]:
        """Return the rows of `slots`, in memory that is not written again; rows beyond a rank's slots are undefined."""
        slots = slots[self._ranks]
        while any(not set(own).isdisjoint(sent) for one in self._in_flight for own, sent in zip(slots, one.slots)):
            self._store_oldest()
        rows = []
        for spec, array in zip(self._specs, self._arrays):
            row = np.empty(spec.shape, array.dtype)
            for rank, own in enumerate(slots):
                for i, slot in enumerate(own):
                    row[rank, i] = array[rank, slot]
            rows.append(row.view(spec.dtype))
        if self._shards:
            return tuple(shard.put(row) for shard, row in zip(self._shards, rows))
        return tuple(rows)

    def _store_oldest(self) -> None:
        transfer = self._in_flight.popleft()
        for i, (array, rows) in enumerate(zip(self._arrays, transfer.rows)):
            arrived = self._shards[i].get(rows) if self._shards else np.asarray(rows).view(array.dtype)
            for rank, own in enumerate(transfer.slots):
                for at, slot in enumerate(own):
                    array[rank, slot] = arrived[rank, at]


def host_pages(
    config: EngineConfig, num_pages: Sequence[int], specs: Sequence[Sequence[ArraySpec]], share_bytes: int = 0
) -> tuple[int, ...]:
    """Return how many pages of host memory each rank gets for each KV group; none without a hierarchical cache.

    `num_pages` are the pages on its devices; states count as the last group. `--hicache-ratio` multiplies them, and
    `--hicache-size` is divided in proportion to their bytes, as are the `share_bytes` that
    `--hicache-host-memory-fraction` comes to. Raises `ConfigError` if the result is 0 or exceeds free memory.
    """
    if not config.enable_hierarchical_cache:
        return ()
    page_bytes = [sum(spec.nbytes // spec.shape[1] for spec in rows) for rows in specs]
    device_bytes = sum(map(operator.mul, num_pages, page_bytes))
    fraction, size = config.hicache_host_memory_fraction, config.hicache_size
    if fraction is None and size is None:
        setting = f"hicache_ratio={config.hicache_ratio:g}"
        counts = tuple(int(pages * config.hicache_ratio) for pages in num_pages)
    else:
        setting = f"hicache_host_memory_fraction={fraction:g}" if size is None else f"hicache_size={size:g}"
        nbytes = share_bytes if size is None else int(size * _GIGABYTE)
        counts = tuple(pages * nbytes // device_bytes for pages in num_pages)
    if min(counts) < 1:
        raise ConfigError(f"{setting} is less than one page of {max(page_bytes) / 2**20:.2f} MiB; raise it")
    free, taken = psutil.virtual_memory().available, sum(map(operator.mul, counts, page_bytes))
    if fraction is None and taken > free:
        raise ConfigError(
            f"{setting} comes to {taken / 2**30:.2f} GiB of host memory, of which {free / 2**30:.2f} GiB "
            f"are free; lower it to {_lower(config, device_bytes, free)}"
        )
    return counts


def _lower(config: EngineConfig, device_bytes: int, free: int) -> str:
    if config.hicache_size is None:
        return f"--hicache-ratio {0.9 * free / device_bytes:.2f}"
    return f"--hicache-size {0.9 * free / _GIGABYTE:.1f}"
