"""An error about memory suggests flags, each of which was tried."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.sizing.deployment import deploy
from jaxserve.runtime.sizing.memory import InsufficientMemoryError
from jaxserve.runtime.sizing.memory_advice import deploy_or_advise, find_fixes
from pallas_kernels.paged_attention import KernelTarget
from tests.runtime.tiny import model


def _facts(megabytes: float, devices: int = 1) -> DeviceFacts:
    return DeviceFacts(KernelTarget("cuda"), int(megabytes * 2**20), devices)


def _as_settings(flag: str) -> dict[str, Any]:
    name, text = flag.split()
    value = float(text) if "." in text else text if text.isalpha() or text.startswith("b") else int(text)
    return {name[2:].replace("-", "_"): value}


@pytest.mark.parametrize("megabytes", [0.9, 1.1, 1.3, 1.5])
def test_every_suggested_flag_makes_room_by_itself(megabytes: float) -> None:
    config = EngineConfig(dtype="float32")
    found = find_fixes(config, model(), _facts(megabytes, 2), lambda _: True)
    for flag in found:
        deploy(msgspec.structs.replace(config, **_as_settings(flag)), model(), _facts(megabytes, 2))
    with pytest.raises(InsufficientMemoryError, match="makes room" if found else "use a larger device"):
        deploy_or_advise(config, model(), _facts(megabytes, 2))


def test_some_sizes_have_a_fix_and_some_have_none() -> None:
    named = {
        megabytes: find_fixes(EngineConfig(), model(), _facts(megabytes), lambda _: True) for megabytes in (0.01, 0.8)
    }
    assert named[0.01] == []
    assert any(flag.startswith("--max-running-requests") for flag in named[0.8])


def test_an_fp8_cache_is_suggested_only_if_a_kernel_supports_it() -> None:
    config = EngineConfig()
    bytes_per_token = deploy(config, model(), _facts(100)).sizes.footprint.kv_per_token
    for capability, named in (((9, 0), ["--kv-cache-dtype fp8_e4m3"]), ((8, 0), [])):
        device = DeviceFacts(KernelTarget("cuda", "a GPU", capability), 100 * 2**20)
        assert (
            find_fixes(config, model(), device, lambda it: it.sizes.footprint.kv_per_token < bytes_per_token) == named
        )


@pytest.mark.parametrize(
    ("devices", "sizes", "named"),
    [(8, {"tp_size": 2}, ["--pp-size 3"]), (4, {"tp_size": 2}, []), (8, {"dp_size": 2}, ["--pp-size 3"])],
)
def test_more_stages_are_suggested_if_there_are_devices(devices: int, sizes: dict[str, int], named: list[str]) -> None:
    config = EngineConfig(**sizes)  # type: ignore[arg-type]
    three = dataclasses.replace(model(), num_layers=3, windows=(None,) * 3)
    assert find_fixes(config, three, _facts(100, devices), lambda made: made.config.pp_size == 3) == named


def test_stages_leave_fewer_devices_for_more_shards() -> None:
    found = [
        find_fixes(EngineConfig(pp_size=2), model(), _facts(100, devices), lambda made: made.config.tp_size == 2)
        for devices in (4, 3)
    ]
    assert found == [["--tp-size 2"], []]


def test_a_fitting_deployment_is_returned() -> None:
    made = deploy_or_advise(EngineConfig(), model(), _facts(100))
    assert made == deploy(EngineConfig(), model(), _facts(100))
