"""jax has no GPU here: that it passes its option on, and what follows from the devices that it finds, is tested."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax._src import xla_bridge

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.devices import restriction as module
from jaxserve.runtime.devices.attach import attach
from jaxserve.runtime.devices.restriction import check_restricted, restrict_devices

TWO = EngineConfig(device_ids=(3, 1), tp_size=2)


@pytest.fixture(autouse=True)
def _a_process_that_has_not_used_jax(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module.xla_bridge, "backends_are_initialized", lambda: False)
    yield
    jax.config.update("jax_cuda_visible_devices", "all")


def _found(count: int, **facts: Any) -> list[Any]:
    """Return the devices of this process, and one of another."""
    own = [SimpleNamespace(**{"platform": "gpu", "process_index": 0, "number": i} | facts) for i in range(count)]
    return [*own, SimpleNamespace(platform="gpu", process_index=1, number=0)]


def test_jax_makes_its_client_of_the_gpus_that_are_named() -> None:
    assert restrict_devices(EngineConfig(tp_size=2), "cuda") == 0
    assert "visible_devices" not in xla_bridge._options_from_jax_configs("cuda")
    assert restrict_devices(TWO, "cuda") == 2
    assert xla_bridge._options_from_jax_configs("cuda")["visible_devices"] == [3, 1]


def test_a_process_keeps_the_devices_that_jax_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    restrict_devices(TWO, "cuda")
    monkeypatch.setattr(module.xla_bridge, "backends_are_initialized", lambda: True)
    assert restrict_devices(TWO, "cuda") == 2
    others = EngineConfig(device_ids=(2,))
    for platform in ("cuda", "tpu"):
        with pytest.raises(ConfigError, match="device_ids=2: jax has taken its devices in this process already"):
            restrict_devices(others, platform)


def test_the_chips_of_a_tpu_are_set_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"TPU_VISIBLE_CHIPS": "4,5,6,7"})
    assert restrict_devices(TWO, "tpu") == 2
    assert os.environ == {
        "TPU_VISIBLE_CHIPS": "7,5", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,2,1", "TPU_PROCESS_BOUNDS": "1,1,1"
    }  # fmt: skip
    with pytest.raises(ConfigError, match="device_ids=3,1 counts among the 2 chips of TPU_VISIBLE_CHIPS, from 0"):
        restrict_devices(TWO, "tpu")
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(ConfigError, match="device_ids=0,1,2 names 3 TPU chips, and a process can have 1, 2, 4, 8"):
        restrict_devices(EngineConfig(device_ids=(0, 1, 2)), "tpu")


def test_devices_that_jax_does_not_find_are_an_error() -> None:
    check_restricted(TWO, 2, _found(2), "")
    with pytest.raises(ConfigError, match="device_ids=3,1: 2 devices are chosen, of which jax finds 1 here"):
        check_restricted(TWO, 2, _found(1), "")
    with pytest.raises(ConfigError, match="device_ids=3,1: none of these devices can be used: no device found"):
        check_restricted(TWO, 2, _found(1, platform="cpu"), "no device found")
    chips = [SimpleNamespace(platform="tpu", process_index=0, coords=(i // 2, 0, 0)) for i in range(4)]
    check_restricted(TWO, 2, chips, "")


def test_a_machine_with_nothing_to_choose_from_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(ConfigError, match="base_gpu_id=1 chooses among GPUs or TPU chips, and this runs on the CPU"):
        attach(EngineConfig(base_gpu_id=1))
