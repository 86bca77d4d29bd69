from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config.data_parallel import Parallelism, parallelism, require_single_process, resolve_dp_mode
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError


@pytest.mark.parametrize(
    ("size", "mode", "served"),
    [
        (1, "auto", (1, 1)),
        (1, "replicas", (1, 1)),
        (4, "auto", (1, 4)),
        (4, "replicas", (1, 4)),
        (4, "mesh", (4, 1)),
    ],
)
def test_a_server_has_replicas_unless_a_mesh_is_asked_for(size: int, mode: str, served: tuple[int, int]) -> None:
    config = resolve_dp_mode(EngineConfig(dp_size=size, dp_mode=mode))  # type: ignore[arg-type]
    divided = parallelism(config)
    assert (divided.data, divided.replicas) == served
    assert config.dp_mode != "auto"


def test_one_process_has_a_mesh() -> None:
    assert parallelism(require_single_process(EngineConfig(dp_size=4), "LLM")) == Parallelism(4, 1)
    assert require_single_process(EngineConfig(dp_mode="replicas"), "LLM").dp_mode == "mesh", "dp_size is 1"
    with pytest.raises(ConfigError, match="dp_mode=replicas starts 4 engine processes, and LLM runs only one"):
        require_single_process(EngineConfig(dp_size=4, dp_mode="replicas"), "LLM")


@pytest.mark.parametrize(
    ("settings", "divided"),
    [
        # Of one rank
        ({"tp_size": 8}, Parallelism(1, 8)),
        ({"tp_size": 8, "pp_size": 2}, Parallelism(1, 8, stages=2)),
        ({"tp_size": 2, "dp_size": 4, "pp_size": 3}, Parallelism(1, 2, 4, stages=3)),
        (
            {"tp_size": 8, "dp_size": 2, "pp_size": 3, "enable_dp_attention": True},
            Parallelism(2, 4, 1, 8, over_ranks=True, stages=3),
        ),
        ({"tp_size": 8, "ep_size": 8}, Parallelism(1, 8, expert_parts=8)),
        ({"tp_size": 8, "ep_size": -1}, Parallelism(1, 8, expert_parts=8)),
        ({"tp_size": 8, "ep_size": 2}, Parallelism(1, 8, expert_parts=2)),
        ({"tp_size": 2, "dp_size": 4, "dp_mode": "mesh", "ep_size": 2}, Parallelism(4, 2, expert_parts=2)),
        ({"tp_size": 2, "dp_size": 4, "dp_mode": "replicas", "ep_size": -1}, Parallelism(1, 2, 4, 2)),
        # Of all ranks, as vLLM's flags ask for it
        ({"dp_size": 8, "ep_size": -1}, Parallelism(8, 1, 1, 8, over_ranks=True)),
        ({"tp_size": 2, "dp_size": 4, "ep_size": 8}, Parallelism(4, 2, 1, 8, over_ranks=True)),
        # And SGLang's, where tp_size counts all devices
        ({"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, Parallelism(8, 1, 1, 8, over_ranks=True)),
        ({"tp_size": 8, "dp_size": 2, "enable_dp_attention": True}, Parallelism(2, 4, 1, 8, over_ranks=True)),
        (
            {"tp_size": 8, "dp_size": 2, "ep_size": 4, "enable_dp_attention": True},
            Parallelism(2, 4, 1, 4, over_ranks=True),
        ),
        ({"ep_size": 8, "enable_dp_attention": True}, Parallelism(8, 1, 1, 8, over_ranks=True)),
    ],
)
def test_experts_are_divided_among_devices(settings: dict[str, Any], divided: Parallelism) -> None:
    config = resolve_dp_mode(EngineConfig(**settings))
    assert parallelism(config) == divided
    assert config.dp_mode == ("mesh" if divided.replicas == 1 else "replicas")


def test_each_stage_has_devices_for_all_ranks() -> None:
    assert Parallelism(2, 4, stages=3).num_devices == 24


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp_size": 4, "ep_size": 3}, "ep_size=3 doesn't fit tp_size=4 and dp_size=1; sizes that do: 1, 2, 4"),
        ({"tp_size": 2, "dp_size": 2, "dp_mode": "mesh", "ep_size": 3}, "sizes that do: 1, 2, 4"),
        ({"dp_size": 8, "dp_mode": "mesh", "ep_size": 2}, "sizes that do: 1, 8"),
        ({"tp_size": 8, "dp_size": 8, "ep_size": 1, "enable_dp_attention": True}, "sizes that do: 8"),
        ({"tp_size": 6, "dp_size": 4, "enable_dp_attention": True}, "set dp_size to 2 or 3 or 6"),
        ({"tp_size": 8, "enable_dp_attention": True}, "set dp_size to 2 or 4 or 8"),
        ({"enable_dp_attention": True}, "set dp_size to their number"),
        ({"dp_size": 4, "dp_mode": "replicas", "enable_dp_attention": True}, "ranks of one program"),
        ({"dp_size": 4, "dp_mode": "replicas", "ep_size": 4}, "sizes that do: 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parallelism(EngineConfig(**settings))
