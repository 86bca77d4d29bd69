from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.engine.multihost.process_group import Nodes
from jaxserve.errors import ConfigError


@pytest.fixture
def three() -> Iterator[list[Nodes]]:
    """A leader and two followers, in one process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    configs = [
        EngineConfig(tp_size=3, nnodes=3, node_rank=rank, dist_init_addr=address, dist_timeout=60) for rank in range(3)
    ]
    reports: list[str] = []
    with ThreadPoolExecutor(3) as pool:
        nodes = list(pool.map(lambda config: Nodes.meet(config, reports.append), configs))
    yield nodes
    for one in nodes:
        one._is_leaving = True  # or the first that is collected would end this process


def _all(nodes: list[Nodes], call: Any) -> list[Any]:
    with ThreadPoolExecutor(len(nodes)) as pool:
        return [done.result(60) for done in [pool.submit(call, one) for one in nodes]]


def test_they_agree_on_what_the_leader_makes_of_all_values(three: list[Nodes]) -> None:
    assert [one.is_leader for one in three] == [True, False, False]
    assert (
        _all(three, lambda one: one.agree([one.rank, "x"], lambda values: values[::-1]))
        == [[[2, "x"], [1, "x"], [0, "x"]]] * 3
    )
    assert _all(three, lambda one: one.agree(10 - one.rank, min)) == [8] * 3


def test_what_the_leader_refuses_is_refused_everywhere(three: list[Nodes]) -> None:
    def refuse(values: list[int]) -> None:
        raise ConfigError(f"{values} are no good")

    def ask(one: Nodes) -> str:
        with pytest.raises(ConfigError) as error:
            one.agree(one.rank, refuse)
        return str(error.value)

    assert _all(three, ask) == ["[0, 1, 2] are no good"] * 3


def test_commands_reach_every_follower_in_order(three: list[Nodes]) -> None:
    leader, *followers = three
    commands = [b"%d" % i for i in range(100)]
    for command in commands:
        leader.broadcast(command)
    assert [[one.next_command() for _ in commands] for one in followers] == [commands] * 2


def test_the_leader_hears_of_compiles_elsewhere(three: list[Nodes]) -> None:
    leader, first, second = three
    first.own_compiles, second.own_compiles = (lambda: 2), (lambda: 3)
    deadline = time.monotonic() + 30
    while leader.compiles_elsewhere != 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (leader.compiles_elsewhere, first.compiles_elsewhere) == (5, 0)


def test_each_knows_by_which_address_it_is_reached(three: list[Nodes]) -> None:
    assert {one.host for one in three} == {"127.0.0.1"}
