from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxserve import host
from jaxserve.api_types import StageTimes
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.multihost.process_group import ProcessGroup
from jaxserve.errors import ConfigError


@pytest.fixture
def groups() -> Iterator[list[ProcessGroup]]:
    """The groups of a leader and two followers, all in this process."""
    address = f"127.0.0.1:{host.free_port()}"
    configs = [
        EngineConfig(tp_size=3, nnodes=3, node_rank=rank, dist_init_addr=address, dist_timeout=60) for rank in range(3)
    ]
    reports: list[str] = []
    with ThreadPoolExecutor(3) as pool:
        connected = list(pool.map(lambda config: ProcessGroup.connect(config, reports.append), configs))
    yield connected
    for group in connected:
        group._is_leaving = True  # otherwise the first that is garbage collected ends this process


def _in_all(groups: list[ProcessGroup], call: Any) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return [done.result(60) for done in [pool.submit(call, group) for group in groups]]


def test_all_get_what_the_leader_decides_from_all_values(groups: list[ProcessGroup]) -> None:
    assert [group.is_leader for group in groups] == [True, False, False]
    assert (
        _in_all(groups, lambda group: group.agree([group.rank, "x"], lambda values: values[::-1]))
        == [[[2, "x"], [1, "x"], [0, "x"]]] * 3
    )
    assert _in_all(groups, lambda group: group.agree(10 - group.rank, min)) == [8] * 3


def test_an_error_of_the_leader_is_raised_in_all(groups: list[ProcessGroup]) -> None:
    def refuse(values: list[int]) -> None:
        raise ConfigError(f"{values} are refused")

    def agree(group: ProcessGroup) -> str:
        with pytest.raises(ConfigError) as error:
            group.agree(group.rank, refuse)
        return str(error.value)

    assert _in_all(groups, agree) == ["[0, 1, 2] are refused"] * 3


def test_commands_reach_every_follower_in_order(groups: list[ProcessGroup]) -> None:
    leader, *followers = groups
    commands = [b"%d" % i for i in range(100)]
    for command in commands:
        leader.broadcast(command)
    assert [[follower.next_command() for _ in commands] for follower in followers] == [commands] * 2


def test_the_leader_knows_the_compiles_of_its_followers(groups: list[ProcessGroup]) -> None:
    leader, first, second = groups
    first.own_compiles, second.own_compiles = (lambda: 2), (lambda: 3)
    deadline = time.monotonic() + 30
    while leader.peer_compiles != 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (leader.peer_compiles, first.peer_compiles) == (5, 0)


def test_the_leader_knows_the_times_of_its_followers_stages(groups: list[ProcessGroup]) -> None:
    leader, first, second = groups
    first.own_stage_times = lambda: {1: StageTimes(1.0, 0.5)}
    second.own_stage_times = lambda: {2: StageTimes(2.0, 0.25), 3: StageTimes(3.0, 0.125)}
    expected = {1: StageTimes(1.0, 0.5), 2: StageTimes(2.0, 0.25), 3: StageTimes(3.0, 0.125)}
    deadline = time.monotonic() + 30
    while leader.peer_stage_times != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leader.peer_stage_times == expected
    assert first.peer_stage_times == {}


def test_each_knows_the_address_by_which_it_is_reached(groups: list[ProcessGroup]) -> None:
    assert {group.host for group in groups} == {"127.0.0.1"}
