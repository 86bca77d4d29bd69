"""The host tier's memory: one row for each of its pages, and the copies from the device that are still on their way.

It owns the memory and its size; which page lies in which slot is the scheduler's. Rows that come from the device are
taken in when they are there, or when one of them is asked for; in the order in which they were sent, so that the last
one of a slot stays.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import jax
import numpy as np
import psutil
from jax.sharding import Mesh

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.execution.local_shard import LocalPart, bits_of, local_part, spans_processes
from jaxserve.runtime.step.state import ArraySpec

# Rows that wait on the device take memory there, which no plan counts.
_MOST_BYTES_ON_THEIR_WAY = 2**28
_MOST_CALLS_ON_THEIR_WAY = 64
_GIGABYTE = 10**9


@dataclasses.dataclass(frozen=True)
class _Sent:
    slots: list[list[int]]
    rows: Sequence[jax.Array]


class HostPool:
    """`num_pages` rows for each rank, like those of `specs` (see `page_copies.row_specs`). Slots are numbers local to a
    rank, and given by rank; memory is taken as they are first used.

    Where `mesh` spans several processes, each has such a pool, of the part that its devices hold.
    """

    def __init__(self, specs: Sequence[ArraySpec], num_pages: int, mesh: Mesh | None = None) -> None:
        self.num_pages = num_pages
        self._parts: list[LocalPart] = []
        self._ranks = slice(None)
        if mesh is not None and spans_processes(mesh):
            self._parts = [local_part(mesh, spec) for spec in specs]
            first = self._parts[0].first[0]
            self._ranks = slice(first, first + self._parts[0].shape[0])
            specs = [dataclasses.replace(part.spec, shape=part.shape) for part in self._parts]
        self._specs = tuple(specs)
        self._arrays = [
            np.empty((spec.shape[0], num_pages, *spec.shape[2:]), bits_of(spec.dtype)) for spec in self._specs
        ]
        self._sent: deque[_Sent] = deque()
        call_bytes = sum(spec.nbytes for spec in specs)
        self._most_sent = max(1, min(_MOST_CALLS_ON_THEIR_WAY, _MOST_BYTES_ON_THEIR_WAY // call_bytes))

    @property
    def nbytes(self) -> int:
        """What it takes when every slot was used."""
        return sum(array.nbytes for array in self._arrays)

    def take(self, slots: list[list[int]], rows: Sequence[jax.Array]) -> None:
        """Take in the first rows of each rank from a call, each into its slot, as soon as they are here."""
        for row in rows:
            for shard in row.addressable_shards if self._parts else ():
                shard.data.copy_to_host_async()
            if not self._parts:
                row.copy_to_host_async()
        self._sent.append(_Sent(slots[self._ranks], rows))
        while len(self._sent) > self._most_sent:
            self._settle()

    def take_arrived(self) -> None:
        """Take in what can be without waiting."""
        while self._sent and all(row.is_ready() for row in self._sent[0].rows):  # type: ignore[attr-defined]
            self._settle()

    def give(self, slots: list[list[int]]) -> tuple[np.ndarray | jax.Array, ...]:
        """Rows for a call, in memory that is never written again; those beyond `slots` hold anything."""
        slots = slots[self._ranks]
        while any(not set(own).isdisjoint(sent) for one in self._sent for own, sent in zip(slots, one.slots)):
            self._settle()
        rows = []
        for spec, array in zip(self._specs, self._arrays):
            row = np.empty(spec.shape, array.dtype)
            for rank, own in enumerate(slots):
                for i, slot in enumerate(own):
                    row[rank, i] = array[rank, slot]
            rows.append(row.view(spec.dtype))
        if self._parts:
            return tuple(part.put(row) for part, row in zip(self._parts, rows))
        return tuple(rows)

    def _settle(self) -> None:
        sent = self._sent.popleft()
        for i, (array, rows) in enumerate(zip(self._arrays, sent.rows)):
            arrived = self._parts[i].get(rows) if self._parts else np.asarray(rows).view(array.dtype)
            for rank, own in enumerate(sent.slots):
                for at, slot in enumerate(own):
                    array[rank, slot] = arrived[rank, at]


def host_pages(config: EngineConfig, num_pages: int, specs: Sequence[ArraySpec]) -> int:
    """How many pages of each rank host memory gets beside `num_pages` on its devices, by `--hicache-size` or
    `--hicache-ratio`.

    Raises `ConfigError` where that is none, or more than there is memory for.
    """
    if not config.enable_hierarchical_cache:
        return 0
    page_bytes = sum(spec.nbytes // spec.shape[1] for spec in specs)
    if config.hicache_size is None:
        count, asked = int(num_pages * config.hicache_ratio), f"hicache_ratio={config.hicache_ratio:g}"
    else:
        count, asked = int(config.hicache_size * _GIGABYTE // page_bytes), f"hicache_size={config.hicache_size:g}"
    if count < 1:
        raise ConfigError(f"{asked} is less than one page of {page_bytes / 2**20:.2f} MiB; raise it")
    free = psutil.virtual_memory().available
    if count * page_bytes > free:
        raise ConfigError(
            f"{asked} comes to {count * page_bytes / 2**30:.2f} GiB of host memory, of which {free / 2**30:.2f} GiB "
            f"are free; lower it to {_lower(config, num_pages, page_bytes, free)}"
        )
    return count


def _lower(config: EngineConfig, num_pages: int, page_bytes: int, free: int) -> str:
    if config.hicache_size is None:
        return f"--hicache-ratio {0.9 * free / (num_pages * page_bytes):.2f}"
    return f"--hicache-size {0.9 * free / _GIGABYTE:.1f}"
