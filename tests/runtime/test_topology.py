"""Meshes of devices that aren't attached; `tests/aot` compiles for them."""

from __future__ import annotations

from typing import Any

import pytest
from jax.experimental import topologies

from jaxserve.errors import ConfigError
from jaxserve.runtime.topology import load_target, target_mesh, target_names


def test_every_target_loads_and_has_a_single_device() -> None:
    assert target_names() == ["nvidia-h200", "tpu-v6e"]
    for name in target_names():
        assert 1 in load_target(name).topologies


def test_an_unknown_target_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="'h300' is not known; there are: nvidia-h200, tpu-v6e"):
        target_mesh("h300")


def test_a_number_of_devices_that_is_no_topology_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor=3 x data=2 devices; there are those of 1, 2, 4, 8"):
        target_mesh("nvidia-h200", tensor=3, data=2)


@pytest.mark.parametrize(("name", "extra"), [("nvidia-h200", "cuda13"), ("tpu-v6e", "tpu")])
def test_a_missing_compiler_is_an_error_that_says_what_to_install(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(**_: Any) -> None:
        raise RuntimeError("no plugin")

    for variable, value in load_target(name).environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(ConfigError, match=rf"no plugin.*install -e '\.\[{extra}\]'"):
        target_mesh(name)
