"""The choice of a backend, and the size of a pool."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import KernelTarget, PagedKV, Problem, choose_backend, kv_layout

PROBLEM = Problem(32, 8, 128, 16, np.dtype(jnp.bfloat16), np.dtype(jnp.bfloat16))


def test_the_choice_has_a_reason() -> None:
    chosen = choose_backend(KernelTarget("cpu", "cpu"), PROBLEM)
    assert (chosen.name, chosen.reason, chosen.interpret) == ("cpu", "the best for cpu", False)
    assert choose_backend(KernelTarget("tpu", "TPU v6 lite"), PROBLEM, "reference").reason == "requested"


def test_a_backend_that_is_not_built_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'fa3' is not built; available: reference, cpu, triton, mosaic_tpu"):
        choose_backend(KernelTarget("cuda", "NVIDIA H200", (9, 0)), PROBLEM, "fa3")


@pytest.mark.parametrize(
    ("kind", "capability"), [("NVIDIA A100-SXM4-80GB", (8, 0)), ("NVIDIA L4", (8, 9)), ("NVIDIA H200", (9, 0))]
)
def test_an_nvidia_gpu_from_ampere_on_has_a_kernel(kind: str, capability: tuple[int, int]) -> None:
    assert choose_backend(KernelTarget("cuda", kind, capability), PROBLEM).name != "reference"
    assert choose_backend(KernelTarget("cuda", kind, capability), PROBLEM, "triton").name == "triton"


def test_heads_that_share_latent_rows_may_be_any_number() -> None:
    for heads in (1, 16, 71, 128):
        problem = dataclasses.replace(PROBLEM, **{**LATENT, "heads": heads})
        assert choose_backend(A100, problem).name == "triton"


def test_a_backend_supports_all_problems_of_a_model() -> None:
    target = KernelTarget("cuda", "NVIDIA H200", (9, 0))
    odd = dataclasses.replace(PROBLEM, dtype=np.dtype(np.float64))
    assert choose_backend(target, [PROBLEM, dataclasses.replace(PROBLEM, head_dim=64)]).name == "triton"
    assert choose_backend(target, [PROBLEM, odd]).name == "reference"
    with pytest.raises(ValueError, match="not in float64"):
        choose_backend(target, [PROBLEM, odd], "triton")


FP8 = np.dtype(jnp.float8_e4m3fn)
LATENT = {"heads": 128, "kv_heads": 1, "head_dim": 576, "value_dim": 512}
A100 = KernelTarget("cuda", "NVIDIA A100-SXM4-80GB", (8, 0))


@pytest.mark.parametrize(
    ("target", "change", "reason"),
    [
        (KernelTarget("cuda", "Tesla T4", (7, 5)), {}, r"capability 8\.0 .* not Tesla T4"),
        (KernelTarget("tpu", "TPU v6 lite"), {}, r"not for tpu"),
        (
            A100,
            {"kv_dtype": FP8},
            r"float8_e4m3fn needs compute capability 8\.9 .* not NVIDIA A100.*, which takes float8_e5m2",
        ),
        (A100, {"head_dim": 520}, r"heads of 16 to 512 in steps of 8, not of 520"),
        (A100, {"heads": 71, "kv_heads": 1}, r"up to 16 query heads a KV head, not 71 for 1"),
        (A100, {"page_size": 48}, r"pages whose size is a power of two, not of 48"),
        (A100, {"dtype": np.dtype(np.float64)}, r"not in float64"),
        (A100, {"kv_dtype": np.dtype(np.int8)}, r"not of int8"),
        (A100, {**LATENT, "head_dim": 640, "value_dim": 640}, r"latent rows with values of 16 to 512 .* not of 640"),
        (A100, {**LATENT, "head_dim": 512}, r"latent rows with other numbers of 8 to 128 .* not of 0"),
        (A100, {**LATENT, "head_dim": 580}, r"other numbers of 8 to 128 in steps of 8, not of 68"),
        (A100, {**LATENT, "kv_heads": 8}, r"latent rows of one KV head a shard, not of 8"),
        (A100, {**LATENT, "page_size": 48}, r"pages whose size is a power of two, not of 48"),
        (A100, {**LATENT, "kv_dtype": FP8}, r"float8_e4m3fn needs compute capability 8\.9"),
    ],
)
def test_triton_refuses_with_a_reason(target: KernelTarget, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        choose_backend(target, dataclasses.replace(PROBLEM, **change), "triton")


@pytest.mark.parametrize(
    ("target", "change", "reason"),
    [
        (KernelTarget("cuda", "NVIDIA H200", (9, 0)), {}, r"not for cuda"),
        (KernelTarget("cpu"), {"kv_dtype": FP8}, r"KV caches of float32 and bfloat16, not float8_e4m3fn"),
        (KernelTarget("cpu"), {"dtype": np.dtype(np.float16)}, r"computes in float32 and bfloat16, not float16"),
        (KernelTarget("cpu"), {"head_dim": 72}, r"heads of 16 to 512 in steps of 16, not of 72"),
        (KernelTarget("cpu"), {"head_dim": 528}, r"not of 528"),
        (
            KernelTarget("cpu"),
            {"head_dim": 1040, "value_dim": 512},
            r"latent rows of 16 to 1024 in steps of 16, not of 1040",
        ),
        (
            KernelTarget("cpu"),
            {"head_dim": 24, "value_dim": 16},
            r"latent rows of 16 to 1024 in steps of 16, not of 24",
        ),
        (KernelTarget("cpu"), {"head_dim": 48, "value_dim": 24}, r"values of latent rows in steps of 16, not of 24"),
        (KernelTarget("cpu"), {"page_size": 8}, r"pages of whole multiples of 16 tokens, not of 8"),
    ],
)
def test_the_cpus_kernel_refuses_with_a_reason(target: KernelTarget, change: dict[str, Any], reason: str) -> None:
    problem = dataclasses.replace(PROBLEM, **change)
    with pytest.raises(ValueError, match=reason):
        choose_backend(target, problem, "cpu")
    if target.platform == "cpu":
        chosen = choose_backend(target, problem)
        assert chosen.name == "reference"
        assert re.search(reason, chosen.reason)


def test_a_pool_has_the_size_of_its_layout() -> None:
    layout = kv_layout(num_layers=3, num_pages=5, page_size=8, num_kv_heads=2, head_dim=16, dtype=jnp.bfloat16)
    kv = PagedKV(jnp.zeros(layout.shape, layout.dtype), jnp.zeros(layout.shape, layout.dtype), 3)
    assert kv.keys.nbytes + kv.values.nbytes == layout.nbytes == 5 * 8 * layout.bytes_per_token
    assert (kv.num_pages, kv.page_size) == (5, 8)
    assert layout.dtype == np.dtype(jnp.bfloat16)
    assert layout.axes[0] == "kv_heads"
