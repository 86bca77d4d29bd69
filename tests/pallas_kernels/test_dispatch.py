from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu, dispatch
from pallas_kernels.dispatch import Backend, BackendName
from pallas_kernels.grouped_matmul import BACKENDS as EXPERTS
from pallas_kernels.paged_attention import BACKENDS as ATTENTION
from pallas_kernels.paged_attention import Problem
from pallas_kernels.quantized_matmul import BACKENDS as PRODUCTS
from pallas_kernels.target import CPU, KernelTarget

BF16 = np.dtype(jnp.bfloat16)
PROBLEM = Problem(32, 8, 128, 16, BF16, BF16)
H200, T4 = KernelTarget("cuda", "NVIDIA H200", (9, 0)), KernelTarget("cuda", "Tesla T4", (7, 5))


@pytest.mark.parametrize("table", [ATTENTION, EXPERTS, PRODUCTS], ids=lambda table: table.room)
def test_each_backend_that_is_tried_is_one_of_the_room(table: dispatch.BackendTable) -> None:
    for names in table.preferred.values():
        assert set(names) < set(table.names)


def test_a_platform_that_nobody_named_has_the_order_of_a_cpu() -> None:
    chosen = ATTENTION.choose(KernelTarget("metal"), (PROBLEM,))
    reason = "the best for metal; not cpu: cpu compiles for the CPU it runs on, not for metal"
    assert (chosen.name, chosen.reason) == ("reference", reason)


def test_the_reason_of_a_choice_names_what_was_refused_before() -> None:
    chosen = ATTENTION.choose(T4, (PROBLEM,))
    assert chosen.name == "reference"
    assert chosen.reason.startswith(
        "the best for Tesla T4; not triton: triton needs an NVIDIA GPU of compute capability"
    )


@pytest.mark.parametrize(
    ("name", "target", "reason"),
    [
        ("triton", KernelTarget("tpu", "TPU v6 lite"), "triton compiles for NVIDIA GPUs, not for tpu"),
        ("mosaic_tpu", H200, "mosaic_tpu compiles for TPUs, not for cuda"),
        ("mosaic_gpu", T4, "mosaic_gpu is written for compute capability 9.0 (Hopper), not for Tesla T4"),
        ("triton", H200, None),
        ("triton", CPU, None),
        ("reference", T4, None),
    ],
)
def test_a_compiler_refuses_a_device(name: BackendName, target: KernelTarget, reason: str | None) -> None:
    assert dispatch.refused_device(name, target) == reason


def test_kernels_of_other_devices_are_interpreted_on_a_cpu() -> None:
    names: tuple[BackendName, ...] = ("reference", "xla", "cpu", "triton", "mosaic_tpu", "mosaic_gpu")
    assert [Backend(name).interpret for name in names] == [False, False, False, True, True, True]
    assert not Backend("triton", H200).interpret


def test_the_fallback_computes_where_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def plus(number: int) -> object:
        return lambda x: x + number

    def run(kernel: object) -> float:
        return float(jax.jit(lambda x: dispatch.on_cpu(kernel, plus(1), x))(0.0))  # type: ignore[arg-type]

    assert (run(plus(2)), run(None)) == (2.0, 1.0)
    monkeypatch.setattr(cpu, "refusal", lambda: "no compiler")
    assert run(plus(2)) == 1.0
    assert dispatch.triton_kernel("sampling", "draw_tokens", T4) is None
