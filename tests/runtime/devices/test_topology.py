"""Meshes of devices that aren't attached; `tests/aot` compiles for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from jax.experimental import topologies

from jaxserve.errors import ConfigError
from jaxserve.runtime.devices.target import load_target
from jaxserve.runtime.devices.topology import target_mesh, target_meshes


def _without_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in load_target(name).environment.items():
        monkeypatch.setenv(variable, value)


@pytest.mark.parametrize(("name", "extra"), [("nvidia-h200", "cuda13"), ("tpu-v6e", "tpu")])
def test_the_error_for_a_missing_compiler_says_what_to_install(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(**_: Any) -> None:
        raise RuntimeError("no plugin")

    _without_environment(name, monkeypatch)
    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(ConfigError, match=rf"no plugin.*install 'jaxserve\[{extra}\]'"):
        target_mesh(name)


def test_a_mesh_of_part_of_a_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def four(**arguments: Any) -> Any:
        asked.update(arguments)
        return SimpleNamespace(devices=["a", "b", "c", "d"])

    _without_environment("tpu-v6e", monkeypatch)
    monkeypatch.setattr(topologies, "get_topology_desc", four)
    mesh = target_mesh("tpu-v6e", tensor=3)
    assert mesh.devices.tolist() == [[["a", "b", "c"]]]
    assert asked["topology_name"] == "v6e:2x2"


@pytest.mark.parametrize(
    ("stages", "asked", "names"),
    [(2, "v6e:2x4", ["abcd", "efgh"]), (3, "v6e:2x4", ["abcd", "efgh", "abcd"])],
)
def test_stages_share_devices_where_no_topology_has_enough(
    stages: int, asked: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {}

    def eight(**given: Any) -> Any:
        arguments.update(given)
        return SimpleNamespace(devices=[*"abcdefgh"])

    _without_environment("tpu-v6e", monkeypatch)
    monkeypatch.setattr(topologies, "get_topology_desc", eight)
    meshes = target_meshes("tpu-v6e", stages, tensor=4)
    assert ["".join(mesh.devices.flat) for mesh in meshes] == names
    assert arguments["topology_name"] == asked
