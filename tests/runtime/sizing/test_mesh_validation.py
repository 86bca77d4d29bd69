"""Impossible mesh shapes are refused, and the error names the nearest possible ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.sizing.mesh_validation import check_mesh
from pallas_kernels.paged_attention import KernelTarget
from tests.runtime.tiny import model


def _refusal(platform: str, most: int, heads: tuple[int, int, int], **sizes: Any) -> str:
    num_heads, num_kv_heads, mlp = heads
    shape = dataclasses.replace(
        model(), num_heads=num_heads, num_kv_heads=num_kv_heads, intermediate_size=mlp
    )  # fmt: skip
    device = DeviceFacts(KernelTarget(platform), 2**34, max_devices=most)
    with pytest.raises(ConfigError) as caught:
        check_mesh(EngineConfig(**sizes), shape, device)
    return str(caught.value)


@pytest.mark.parametrize(
    ("heads", "tensor", "nearest"),
    [
        ((32, 8, 14336), 3, "--tp-size 2 or --tp-size 4"),
        ((32, 8, 14336), 7, "--tp-size 4 or --tp-size 8"),
        ((9, 3, 1536), 2, "--tp-size 1 or --tp-size 3"),
        ((9, 3, 1536), 9, "--tp-size 3"),
        ((12, 4, 48), 6, "--tp-size 4"),
        ((16, 1, 36), 8, "--tp-size 4"),
    ],
)
def test_a_size_that_does_not_divide_the_heads_is_refused(
    heads: tuple[int, int, int], tensor: int, nearest: str
) -> None:
    message = _refusal("cuda", 8, heads, tp_size=tensor)
    assert f"tp_size={tensor} can't split this model evenly ({heads[0]} attention heads, {heads[1]} KV heads" in message
    assert message.endswith(f"the nearest that can: {nearest}")


@pytest.mark.parametrize("sizes", [{}, {"tp_size": 2}, {"tp_size": 4}, {"tp_size": 8}])
def test_kv_heads_are_split_or_repeated(sizes: dict[str, int]) -> None:
    shape = dataclasses.replace(model(), num_heads=8, num_kv_heads=2)
    check_mesh(EngineConfig(**sizes), shape, DeviceFacts(KernelTarget("cuda"), 2**34, max_devices=8))


def test_more_devices_than_available_are_refused() -> None:
    llama = (32, 8, 14336)
    message = _refusal("cuda", 4, llama, tp_size=8)
    assert message == "tp_size=8 and dp_size=1 take 8 devices, and there are 4; what fits: --tp-size 4 --dp-size 1"


def test_the_error_on_a_cpu_says_how_to_simulate_devices() -> None:
    message = _refusal("cpu", 1, (4, 2, 48), tp_size=4)
    assert message.endswith("; XLA_FLAGS=--xla_force_host_platform_device_count=4 makes a CPU simulate them")
