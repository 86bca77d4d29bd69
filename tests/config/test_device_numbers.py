from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config.device_numbers import device_numbers, devices_named, on_all_devices
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError

NODES = {"nnodes": 2, "dist_init_addr": "10.0.0.1:5000"}


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({}, None),
        ({"device_ids": (3, 1)}, (3,)),
        ({"device_ids": (3, 1), "tp_size": 2}, (3, 1)),
        ({"base_gpu_id": 4, "tp_size": 2}, (4, 5)),
        ({"base_gpu_id": 1, "gpu_id_step": 2, "tp_size": 2, "pp_size": 2}, (1, 3, 5, 7)),
        ({"gpu_id_step": 2, "dp_size": 2, "dp_mode": "replicas"}, (0, 2)),
        ({"gpu_id_step": 2, "dp_size": 2, "dp_mode": "mesh"}, (0, 2)),
        ({"base_gpu_id": 2, "tp_size": 4, **NODES}, (2, 3)),
        ({"base_gpu_id": 2, "tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, (2, 3, 4, 5)),
    ],
)
def test_as_many_gpus_are_named_as_the_sizes_need(settings: dict[str, Any], numbers: tuple[int, ...] | None) -> None:
    assert device_numbers(EngineConfig(**settings), "cuda") == numbers
    assert device_numbers(on_all_devices(EngineConfig(**settings)), "cuda") is None


def test_too_few_gpus_are_an_error_with_both_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        device_numbers(EngineConfig(device_ids=(2, 3, 5), tp_size=2, dp_size=2, dp_mode="replicas"), "gpu")
    assert str(caught.value) == "device_ids=2,3,5 names 3 devices, and tp_size=2 dp_size=2 need 4"


def test_all_chips_that_are_named_are_used() -> None:
    """A chip may be two devices, so that fewer chips than devices may be enough."""
    assert device_numbers(EngineConfig(device_ids=(2, 3), tp_size=4), "tpu") == (2, 3)
    with pytest.raises(ConfigError, match="base_gpu_id=2 counts GPUs, and this is a TPU: set device_ids"):
        device_numbers(EngineConfig(base_gpu_id=2), "tpu")


@pytest.mark.parametrize("settings", [{"device_ids": (0,)}, {"base_gpu_id": 1}, {"gpu_id_step": 2}])
def test_a_cpu_has_no_devices_to_choose(settings: dict[str, Any]) -> None:
    config = EngineConfig(**settings)
    with pytest.raises(ConfigError, match=f"{devices_named(config)} chooses among GPUs or TPU chips, and this runs on"):
        device_numbers(config, "cpu")


def test_the_defaults_ask_for_nothing() -> None:
    assert device_numbers(EngineConfig(base_gpu_id=0, gpu_id_step=1, tp_size=8), "cpu") is None
