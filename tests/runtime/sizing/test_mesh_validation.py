"""Impossible mesh shapes are refused, and the error names the nearest possible ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxserve.config.data_parallel import resolve_dp_mode
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import parse_model_config
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


@pytest.mark.parametrize(
    ("most", "sizes", "fits"),
    [
        (8, {"tp_size": 4, "pp_size": 3}, "--tp-size 2 --dp-size 1 --pp-size 3 or --tp-size 4 --dp-size 1 --pp-size 2"),
        (6, {"tp_size": 2, "dp_size": 2, "pp_size": 2}, "--tp-size 2 --dp-size 1 --pp-size 2 or --tp-size 1 --dp-size 2"
         " --pp-size 2 or --tp-size 2 --dp-size 2 --pp-size 1"),
        (2, {"pp_size": 4}, "--tp-size 1 --dp-size 1 --pp-size 2"),
        (1, {"tp_size": 2, "pp_size": 2}, "--tp-size 1 --dp-size 1 --pp-size 1"),
    ],
)  # fmt: skip
def test_more_stages_than_there_are_devices_for_are_refused(most: int, sizes: dict[str, int], fits: str) -> None:
    message = _refusal("cuda", most, (32, 8, 14336), **sizes)
    tensor, data, stages = (sizes.get(name, 1) for name in ("tp_size", "dp_size", "pp_size"))
    assert message == (
        f"tp_size={tensor} and dp_size={data} with pp_size={stages} take {tensor * data * stages} devices, and there "
        f"are {most}; what fits: {fits}"
    )


def test_stages_leave_fewer_devices_for_shards() -> None:
    facts = DeviceFacts(KernelTarget("cuda"), 2**34, max_devices=8)
    check_mesh(EngineConfig(tp_size=2, pp_size=4), model(), facts)
    assert _refusal("cuda", 8, (32, 8, 14336), tp_size=3, pp_size=4).endswith("the nearest that can: --tp-size 2")


def test_the_error_on_a_cpu_says_how_to_simulate_devices() -> None:
    message = _refusal("cpu", 1, (4, 2, 48), tp_size=4)
    assert message.endswith("; XLA_FLAGS=--xla_force_host_platform_device_count=4 makes a CPU simulate them")


def mixture(**sizes: int) -> ModelConfig:
    """Return a mixture of 12 experts of width 24, whose heads any power of two up to 8 divides."""
    raw = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 32,
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_attention_heads": 8,
        "num_experts": 12,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
        "vocab_size": 64,
    }
    return parse_model_config(raw | sizes)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp_size": 8},
        {"tp_size": 4, "ep_size": 4},
        {"tp_size": 8, "ep_size": 2},
        {"dp_size": 4, "ep_size": 4},
        {"dp_size": 2, "tp_size": 2, "ep_size": 4},
        {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True},
        {"tp_size": 8, "dp_size": 2, "ep_size": 4, "enable_dp_attention": True},
    ],
)
def test_experts_that_divide_evenly_are_allowed(sizes: dict[str, Any]) -> None:
    config = resolve_dp_mode(EngineConfig(**sizes))
    check_mesh(config, mixture(), DeviceFacts(KernelTarget("cuda"), 2**34, max_devices=8))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp_size": 8, "ep_size": 8}, "12 experts of width 24 evenly; sizes that can: 1, 2, 4"),
        ({"dp_size": 8, "ep_size": 8}, "12 experts of width 24 evenly; no size can: use fewer devices"),
        ({"tp_size": 8, "dp_size": 2, "enable_dp_attention": True}, "evenly; sizes that can: 2, 4"),
    ],
)
def test_experts_that_do_not_are_refused_with_sizes_that_do(sizes: dict[str, Any], message: str) -> None:
    config = resolve_dp_mode(EngineConfig(**sizes))
    with pytest.raises(ConfigError, match=message):
        check_mesh(config, mixture(), DeviceFacts(KernelTarget("cuda"), 2**34, max_devices=8))


@pytest.mark.parametrize(
    ("sizes", "asked"),
    [
        ({"tp_size": 2, "ep_size": 2}, "ep_size=2"),
        ({"dp_size": 2, "enable_dp_attention": True}, "enable_dp_attention"),
        ({"all2all_backend": "ragged_all_to_all"}, "all2all_backend=ragged_all_to_all"),
    ],
)
def test_a_dense_model_has_no_experts_to_divide(sizes: dict[str, Any], asked: str) -> None:
    with pytest.raises(ConfigError, match=f"{asked} is for mixtures of experts"):
        check_mesh(EngineConfig(**sizes), model(), DeviceFacts(KernelTarget("cuda"), 2**34, max_devices=8))


def test_tokens_are_sent_only_to_experts_of_other_ranks() -> None:
    facts = DeviceFacts(KernelTarget("cuda"), 2**34, max_devices=8)
    sizes: dict[str, Any] = {"tp_size": 4, "ep_size": 4}
    check_mesh(EngineConfig(all2all_backend="allgather_reducescatter", **sizes), mixture(), facts)
    with pytest.raises(ConfigError, match="every rank has all experts, so no token is sent"):
        check_mesh(EngineConfig(all2all_backend="ragged_all_to_all", **sizes), mixture(), facts)
