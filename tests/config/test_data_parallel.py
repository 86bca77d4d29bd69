from __future__ import annotations

import pytest

from jaxserve.config.data_parallel import ranks_and_replicas, require_single_process, resolve_dp_mode
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
    assert ranks_and_replicas(config) == served
    assert config.dp_mode != "auto"


def test_one_process_has_a_mesh() -> None:
    assert ranks_and_replicas(require_single_process(EngineConfig(dp_size=4), "LLM")) == (4, 1)
    assert require_single_process(EngineConfig(dp_mode="replicas"), "LLM").dp_mode == "mesh", "dp_size is 1"
    with pytest.raises(ConfigError, match="dp_mode=replicas starts 4 engine processes, and LLM runs only one"):
        require_single_process(EngineConfig(dp_size=4, dp_mode="replicas"), "LLM")
