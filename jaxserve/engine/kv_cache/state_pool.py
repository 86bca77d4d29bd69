"""The rows of a pool of states: which are free, which belong to running requests, and which are snapshots.

A row has the state of one sequence after some of its tokens. A snapshot belongs to a node of the prefix tree, and has
the state at its end; or a running request keeps it until it stops. This module knows neither tokens nor memory. The
pool of the device and that of copies in host memory are both of this kind.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Protocol

from jaxserve.engine.kv_cache.eviction import EvictionPolicy

ON_DEVICE, IN_HOST_MEMORY = 0, 1
"""The places of rows in `RadixNode.states`."""


class SnapshotOwner(Protocol):
    """A node or a running request, which has one snapshot in each place."""

    states: list[int | None]
    num_uses: int
    priority: int


# Of snapshots that are worth the same, the least recently used one is evicted.
_WORTHS: dict[EvictionPolicy, Callable[[SnapshotOwner], int] | None] = {
    "lru": None,
    "lfu": attrgetter("num_uses"),
    "priority": attrgetter("priority"),
}


class StatePool:
    """`num_states` rows in one `place`. Owners keep their snapshot's row in `states[place]`.

    If no row is free, a snapshot gives up its row: the least recently used one, or as `policy` says that of an owner
    with the fewest uses or the lowest priority. Rows that the plan being made reads or writes are held until the next
    plan, so that no other sequence gets them in the same step. `count` is told of an owner that gets a snapshot (1) or
    loses it (-1).
    """

    def __init__(
        self,
        num_states: int,
        place: int = ON_DEVICE,
        count: Callable[[SnapshotOwner, int], None] | None = None,
        policy: EvictionPolicy = "lru",
    ) -> None:
        self.num_states = num_states
        self.num_evicted = 0
        self._place = place
        self._worth = _WORTHS[policy]
        self._count = count
        self._free = list(range(num_states - 1, -1, -1))
        self._snapshots: OrderedDict[int, SnapshotOwner] = OrderedDict()
        self._held: set[int] = set()

    @property
    def num_snapshots(self) -> int:
        """The number of rows that are snapshots."""
        return len(self._snapshots)

    @property
    def num_used(self) -> int:
        """The number of rows that belong to running requests and are no snapshots."""
        return self.num_states - len(self._free) - len(self._snapshots)

    @property
    def num_available(self) -> int:
        """The number of rows that can be taken now."""
        return len(self._free) + len(self._snapshots) - len(self._held & self._snapshots.keys())

    def start_plan(self) -> None:
        """Hold no row any more: steps run in the order of their plans."""
        self._held.clear()

    def take(self, save: Callable[[SnapshotOwner], None] | None = None) -> int | None:
        """Take a free row, or that of a snapshot; None if all are in use or held.

        `save` is called before a snapshot is lost.
        """
        if self._free:
            return self._free.pop()
        rows = (row for row in self._snapshots if row not in self._held)
        worth = self._worth
        row = (
            next(rows, None) if worth is None else min(rows, key=lambda row: worth(self._snapshots[row]), default=None)
        )
        if row is None:
            return None
        owner = self._snapshots[row]
        if save is not None:
            save(owner)
        self.num_evicted += 1
        return self.take_from(owner)

    def take_from(self, owner: SnapshotOwner) -> int:
        """Take the row of a snapshot, which is lost."""
        row = owner.states[self._place]
        assert row is not None
        owner.states[self._place] = None
        del self._snapshots[row]
        if self._count is not None:
            self._count(owner, -1)
        return row

    def release(self, row: int) -> None:
        """Free a row that is no snapshot."""
        assert row not in self._snapshots, f"row {row} is a snapshot"
        self._free.append(row)

    def give(self, owner: SnapshotOwner, row: int) -> None:
        """Make a row that was taken the snapshot of `owner`, which has none."""
        assert owner.states[self._place] is None
        owner.states[self._place] = row
        self._snapshots[row] = owner
        if self._count is not None:
            self._count(owner, 1)

    def use(self, owner: SnapshotOwner) -> None:
        """Record that the snapshot of `owner`, if it has one, was used."""
        if (row := owner.states[self._place]) is not None:
            self._snapshots.move_to_end(row)

    def hold(self, owner: SnapshotOwner) -> None:
        """Keep the snapshot of `owner`, if it has one, until the next plan is made."""
        if (row := owner.states[self._place]) is not None:
            self._held.add(row)

    def drop(self, owner: SnapshotOwner) -> None:
        """Free the row of the snapshot of `owner`, if it has one."""
        if owner.states[self._place] is not None:
            self._free.append(self.take_from(owner))

    def move(self, owner: SnapshotOwner) -> None:
        """Record that `owner` has taken over its snapshot from another owner."""
        if (row := owner.states[self._place]) is not None:
            self._snapshots[row] = owner

    def check(self, rows: Iterable[int], owners: Iterable[SnapshotOwner]) -> list[str]:
        """Return the inconsistencies found, as sentences; `rows` are those of requests, `owners` may have snapshots."""
        snapshots = {row: owner for owner in owners if (row := owner.states[self._place]) is not None}
        counts = Counter([*self._free, *rows, *snapshots])
        problems = [
            f"state {row} is free or owned {counts[row]} times" for row in range(self.num_states) if counts[row] != 1
        ]
        problems += [
            f"state {row} doesn't know the cached run that it belongs to"
            for row in snapshots.keys() | self._snapshots.keys()
            if snapshots.get(row) is not self._snapshots.get(row)
        ]
        return problems
