from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config.data_parallel import resolve_dp_mode
from jaxserve.config.load import GivenSetting, load_config
from jaxserve.config.processes import parse_address
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError

HERE = "127.0.0.1:5000"


@pytest.mark.parametrize(
    ("text", "parts"),
    [("10.0.0.1:5000", ("10.0.0.1", 5000)), ("node-0.mesh:80", ("node-0.mesh", 80)), ("[fd00::1]:1", ("fd00::1", 1))],
)
def test_an_address_is_host_and_port(text: str, parts: tuple[str, int]) -> None:
    assert parse_address(text) == parts


@pytest.mark.parametrize(
    "text", ["", "10.0.0.1", ":5000", "fd00::1:5000", "a:0", "a:65536", "a:x", "a:", "a:-1", "a:²"]
)
def test_other_texts_are_errors(text: str) -> None:
    with pytest.raises(ConfigError, match="dist_init_addr"):
        parse_address(text)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"nnodes": 2, "tp_size": 2}, "nnodes=2 needs dist_init_addr"),
        ({"dist_init_addr": HERE}, "set nnodes"),
        ({"node_rank": 1}, "node_rank=1 with nnodes=1: it must be 0"),
        ({"nnodes": 2, "node_rank": 2, "tp_size": 2, "dist_init_addr": HERE}, r"in \[0, 1\]"),
        ({"nnodes": 2, "node_rank": -1, "tp_size": 2, "dist_init_addr": HERE}, r"in \[0, 1\]"),
        ({"nnodes": 0}, "nnodes must be at least 1"),
        ({"nnodes": 2, "dist_init_addr": HERE}, "possible: tp_size=2 dp_size=1 or tp_size=1 dp_size=2"),
        ({"nnodes": 3, "tp_size": 3, "dp_size": 2, "dist_init_addr": HERE}, "possible: tp_size=3 dp_size=6"),
        (
            {"nnodes": 4, "pp_size": 3, "dist_init_addr": HERE},
            "tp_size=1 dp_size=1 pp_size=3 can't .* nnodes=4: .* possible: tp_size=1 dp_size=1 pp_size=4",
        ),
        (
            {"nnodes": 4, "tp_size": 3, "pp_size": 2, "dist_init_addr": HERE},
            "possible: tp_size=12 dp_size=1 pp_size=2 or tp_size=3 dp_size=4 pp_size=2 or .* or "
            "tp_size=3 dp_size=1 pp_size=4",
        ),
        ({"nnodes": 2, "tp_size": 2, "dist_init_addr": HERE, "programs": "x"}, "programs=x"),
        ({"nnodes": 2, "dp_size": 2, "dist_init_addr": HERE, "dp_mode": "replicas"}, "dp_mode=replicas"),
    ],
)
def test_contradicting_settings_are_errors(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    ("tensor", "data", "nnodes"), [(2, 1, 2), (4, 2, 2), (4, 2, 4), (1, 4, 2), (2, 3, 3), (2, 2, 4)]
)
def test_processes_get_whole_ranks_or_equal_parts_of_one(tensor: int, data: int, nnodes: int) -> None:
    EngineConfig(tp_size=tensor, dp_size=data, nnodes=nnodes, dist_init_addr=HERE)


@pytest.mark.parametrize(
    ("stages", "tensor", "data", "nnodes"),
    [(2, 1, 1, 2), (4, 1, 1, 2), (6, 3, 1, 2), (2, 2, 1, 4), (2, 1, 2, 4), (2, 4, 2, 8), (2, 2, 4, 4)],
)
def test_processes_get_whole_stages_or_equal_parts_of_one(stages: int, tensor: int, data: int, nnodes: int) -> None:
    EngineConfig(pp_size=stages, tp_size=tensor, dp_size=data, nnodes=nnodes, dist_init_addr=HERE)


def test_several_processes_share_a_mesh_by_default() -> None:
    assert resolve_dp_mode(EngineConfig(dp_size=2, nnodes=2, dist_init_addr=HERE)).dp_mode == "mesh"
    assert resolve_dp_mode(EngineConfig(dp_size=2)).dp_mode == "replicas"


def test_names_of_other_engines() -> None:
    flags = [
        GivenSetting("nccl_init_addr", HERE, "flag", "--nccl-init-addr"),
        GivenSetting("nnodes", "2", "flag", "--nnodes"),
    ]
    engine = load_config([*flags, GivenSetting("tp", "2", "flag", "--tp")]).engine
    assert engine.dist_init_addr == HERE
    with pytest.raises(ConfigError, match="--dist-init-addr HOST:PORT"):
        load_config([GivenSetting("master_addr", "10.0.0.1", "flag", "--master-addr")])
