from __future__ import annotations

import dataclasses

import pytest

from jaxserve.engine.kv_cache.state_pool import IN_HOST_MEMORY, SnapshotOwner, StatePool


@dataclasses.dataclass
class Owner:
    name: str = ""
    states: list[int | None] = dataclasses.field(default_factory=lambda: [None, None])
    num_uses: int = 1
    priority: int = 0


def _full(pool: StatePool, place: int = 0) -> list[Owner]:
    """Make every row of a pool a snapshot, and return their owners, the least recently used first."""
    owners = [Owner(str(i)) for i in range(pool.num_states)]
    for owner in owners:
        row = pool.take()
        assert row is not None
        pool.give(owner, row)
    assert pool.check([], owners) == []
    return owners


def test_each_row_is_taken_once() -> None:
    pool = StatePool(3)
    rows = [pool.take() for _ in range(3)]
    assert sorted(row for row in rows if row is not None) == [0, 1, 2]
    assert (pool.take(), pool.num_used, pool.num_available) == (None, 3, 0)
    pool.release(1)
    assert (pool.num_used, pool.num_available, pool.take()) == (2, 1, 1)


def test_the_least_recently_used_snapshot_gives_up_its_row() -> None:
    pool = StatePool(3)
    owners = _full(pool)
    lost: list[SnapshotOwner] = []
    pool.use(owners[0])
    row = owners[1].states[0]
    assert pool.take(lost.append) == row
    assert (lost, owners[1].states, pool.num_evicted) == ([owners[1]], [None, None], 1)
    pool.take()
    assert [owner.name for owner in owners if owner.states[0] is not None] == ["0"]
    assert (pool.num_snapshots, pool.num_used) == (1, 2)


def test_held_snapshots_stay_until_the_next_plan() -> None:
    pool = StatePool(2)
    first, second = _full(pool)
    pool.hold(first)
    assert pool.num_available == 1
    pool.take()
    assert first.states[0] is not None
    assert second.states[0] is None
    assert (pool.num_available, pool.take()) == (0, None)
    pool.start_plan()
    assert pool.num_available == 1
    assert pool.take() is not None


def test_free_rows_are_taken_before_snapshots() -> None:
    pool = StatePool(2)
    first, second = _full(pool)
    pool.drop(second)
    pool.take()
    assert first.states[0] is not None
    assert pool.num_evicted == 0


def test_rows_in_host_memory_are_those_of_another_place() -> None:
    pool = StatePool(1, IN_HOST_MEMORY)
    [owner] = _full(pool)
    assert owner.states == [None, 0]
    pool.drop(owner)
    assert owner.states == [None, None]


def test_a_snapshot_follows_the_node_that_takes_it_over() -> None:
    pool = StatePool(1)
    [owner] = _full(pool)
    heir = Owner("heir", owner.states)
    owner.states = [None, None]
    pool.move(heir)
    assert pool.check([], [owner, heir]) == []
    pool.take()
    assert heir.states == [None, None]


def test_a_snapshot_is_not_freed_as_a_row() -> None:
    pool = StatePool(1)
    [owner] = _full(pool)
    assert owner.states[0] is not None
    with pytest.raises(AssertionError, match="is a snapshot"):
        pool.release(owner.states[0])


def test_the_check_finds_rows_that_are_lost_or_shared() -> None:
    pool = StatePool(3)
    owners = _full(pool)
    assert pool.check([0], owners) == ["state 0 is free or owned 2 times"]
    pool.take_from(owners[2])
    assert pool.check([], owners) == ["state 2 is free or owned 0 times"]
    assert pool.check([2], [owners[0]]) == [
        "state 1 is free or owned 0 times",
        "state 1 doesn't know the cached run that it belongs to",
    ]
