"""Every target is complete, and its facts agree with the description that the compiler gets."""

from __future__ import annotations

import pytest

from jaxserve.errors import ConfigError
from jaxserve.runtime.devices.target import load_target, target_names


def test_target_names() -> None:
    assert target_names() == [
        "nvidia-a100-80",
        "nvidia-b200",
        "nvidia-h100",
        "nvidia-h200",
        "nvidia-l4",
        "nvidia-l40s",
        "tpu-v5e",
        "tpu-v6e",
        "tpu-v7",
    ]


@pytest.mark.parametrize("name", target_names())
def test_a_target_has_all_facts_and_topologies_of_one_to_eight_devices(name: str) -> None:
    target = load_target(name)
    assert 15e9 < target.memory_bytes < 200e9
    assert 2e11 < target.memory_bandwidth < 1e13
    assert 1e14 < target.peak_flops["bfloat16"] <= target.peak_flops.get("float8", 1e18)
    assert all(target.topology(count) for count in range(1, 9))
    assert (target.target_config is not None) == (target.platform == "cuda")
    if target.target_config is not None:
        assert target.compute_capability is not None
        major, minor = target.compute_capability.split(".")
        assert f'device_description_str: "{target.device_kind}"' in target.target_config
        assert f"major: {major} minor: {minor}" in target.target_config
        assert f"device_memory_size: {target.memory_bytes}" in target.target_config
        assert f"memory_bandwidth: {target.memory_bandwidth}" in target.target_config


def test_the_smallest_sufficient_topology_is_chosen() -> None:
    assert load_target("tpu-v6e").topology(3) == load_target("tpu-v6e").topology(4)
    assert load_target("nvidia-h200").topology(3)["topology"] == "1x1x3"


def test_more_devices_than_any_topology_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="'nvidia-h200' has no topology of 32 devices: 16 are the most"):
        load_target("nvidia-h200").topology(32)


def test_the_devices_of_all_hosts_count() -> None:
    assert [load_target("nvidia-h200").max_devices(nnodes) for nnodes in (1, 2, 3)] == [8, 16, 16]
    assert load_target("tpu-v6e").max_devices(1) == 8


def test_each_stage_may_have_a_topology_of_its_own() -> None:
    h200, v6e = load_target("nvidia-h200"), load_target("tpu-v6e")
    assert [h200.max_devices(nnodes, 2) for nnodes in (1, 3, 4, 5)] == [8, 24, 32, 32]
    assert [v6e.max_devices(nnodes, 2) for nnodes in (1, 2, 3)] == [8, 16, 16]


def test_the_error_for_an_unknown_target_lists_the_targets() -> None:
    with pytest.raises(ConfigError, match=r"'zz' is not known; there are: nvidia-a100-80, .*tpu-v7"):
        load_target("zz")
    with pytest.raises(ConfigError, match="did you mean nvidia-h100"):
        load_target("nvidia-h10")
