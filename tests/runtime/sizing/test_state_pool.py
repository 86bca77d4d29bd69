"""How many requests run, and how many states there are, in models that keep a state for each sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.sizing.aot import deploy_on_target
from jaxserve.runtime.sizing.memory import CPU_POOL_BYTES
from jaxserve.runtime.sizing.state_pool import resolve_running
from pallas_kernels.target import KernelTarget
from tests.models.hub_hybrids import HYBRIDS

_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_MIB = 2**20
_GPU, _CPU = (DeviceFacts(KernelTarget(platform), 80 * 2**30) for platform in ("gpu", "cpu"))


def resolve(device: DeviceFacts, *, state_bytes: int | None = 60 * _MIB, **settings: Any) -> tuple[int, int]:
    cpu = device.platform == "cpu"
    return resolve_running(
        EngineConfig(**{"mem_fraction_static": 0.9} | settings),
        device,
        default=32 if cpu else 256,
        multiple=1 if cpu else 8,
        slot_bytes=12 * _MIB,
        state_bytes=state_bytes,
        token_bytes=20 * 1024,
        weight_bytes=36 * 2**30,
        num_devices=1,
    )


def test_memory_is_divided_between_states_and_tokens() -> None:
    running, states = resolve(_GPU)
    assert (running % 8, states) == (0, running + running // 2)
    free = int(80 * 2**30 * 0.9) - 36 * 2**30 - 8 * 60 * _MIB
    each = 12 * _MIB + 90 * _MIB + 4096 * 20 * 1024
    assert running * each <= free < (running + 8) * each


def test_bytes_of_the_kv_cache_are_left_out_of_what_states_get() -> None:
    few, many = (resolve(_GPU, mem_fraction_static=None, kv_cache_memory_bytes=size)[0] for size in (20 * 2**30, 2**20))
    each = 102 * _MIB + 4096 * 20 * 1024
    assert abs((many - few) * each - 20 * 2**30) < 9 * each


def test_a_cpu_keeps_as_many_bytes_of_states_as_of_tokens() -> None:
    running, states = resolve(_CPU)
    assert running == CPU_POOL_BYTES // (102 * _MIB)
    assert states == running + 8
    assert resolve(_CPU, state_bytes=1024)[0] == 32


def test_what_is_set_is_kept() -> None:
    assert resolve(_GPU, max_running_requests=300) == (300, 450)
    assert resolve(_GPU, max_running_requests=4, max_mamba_cache_size=4) == (4, 4)
    assert resolve(_GPU, max_mamba_cache_size=100) == (100, 100)


def test_without_states_there_is_no_pool() -> None:
    assert resolve(_GPU, state_bytes=None) == (256, 0)
    with pytest.raises(ConfigError, match="max_mamba_cache_size=7: no layer of this model keeps a state"):
        resolve(_GPU, state_bytes=None, max_mamba_cache_size=7)


def test_every_running_request_has_a_state() -> None:
    with pytest.raises(ConfigError, match="max_mamba_cache_size=7 is less than max_running_requests=8"):
        resolve(_GPU, max_running_requests=8, max_mamba_cache_size=7)


@pytest.mark.parametrize(
    ("name", "target", "tensor", "state_bytes", "of_32k"),
    [
        ("Qwen3.6-35B-A3B", "nvidia-h100", 1, 30 * (32 * 128 * 128 * 4 + 16 * 512 * 3 * 2), 44),
        ("Qwen3.5-397B-A17B", "nvidia-h200", 8, 45 * (8 * 128 * 128 * 4 + 2 * 768 * 3 * 2), 143),
    ],
)
def test_hybrids_of_the_hub_fit_their_devices(
    tmp_path: Path, name: str, target: str, tensor: int, state_bytes: int, of_32k: int
) -> None:
    """In fp8, with as many sequences of 32,768 tokens as `max_running_requests`, all of them at once."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(HYBRIDS[name][0] | {"quantization_config": _FP8}))
    settings: dict[str, Any] = {"context_length": 32768, "max_running_requests": of_32k, "tp_size": tensor}
    made = deploy_on_target(EngineConfig(model=str(config), **settings), target)
    assert made.sizes.state_bytes == state_bytes
    assert made.capacity.num_states == of_32k + max(of_32k // 2, 8)
    assert made.capacity.num_pages * 16 >= of_32k * 32768
    assert made.capacity.max_model_len == 32768
