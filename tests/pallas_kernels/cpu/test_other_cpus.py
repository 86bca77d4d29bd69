"""The CPU's kernels compile for other CPUs, and use nothing that those CPUs or their C library lack."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable
from typing import Any, get_args

import llvmlite.binding as llvm
import numpy as np
import pytest

from pallas_kernels.activation.cpu import GatedSilu
from pallas_kernels.cpu import Kernel, cpu_features, refusal, tile_registers
from pallas_kernels.cpu.compile import optimized
from pallas_kernels.gated_delta.cpu.backend import GatedDelta
from pallas_kernels.gated_delta.cpu.operands import CpuDelta
from pallas_kernels.grouped_matmul.cpu.kernel import GroupedMatmul
from pallas_kernels.ngram_lookup.cpu import ProposeByNgrams
from pallas_kernels.normalization.cpu import LogSumExp, Norm
from pallas_kernels.packed_attention.cpu.backend import PackedAttention
from pallas_kernels.packed_attention.cpu.blocks import CpuPacked
from pallas_kernels.paged_attention import KernelTarget, Problem, choose_backend
from pallas_kernels.paged_attention.cpu.backend import PagedAttention
from pallas_kernels.paged_attention.cpu.tiles import CpuAttention
from pallas_kernels.quantized_matmul.cpu.kernel import PackedMatmul
from pallas_kernels.quantized_matmul.cpu.layout import Format
from pallas_kernels.quantized_matmul.cpu.reorder import ReorderInputs
from pallas_kernels.sampling.cpu import DrawTokens
from tests.selection import grid

pytestmark = pytest.mark.slow

LINUX, MAC = ("aarch64-unknown-linux-gnu", "generic"), ("arm64-apple-darwin", "apple-m1")
KERNELS: list[Kernel] = [
    *(PackedMatmul(format) for format in get_args(Format)),
    PackedMatmul("fp8", factors=True),
    GroupedMatmul("fp4"),
    ReorderInputs(),
    *(
        PagedAttention(
            CpuAttention(
                group=3,
                head_dim=64,
                page_size=16,
                dtype=dtype,
                kv_dtype=dtype,
                scale=0.125,
                window=window,
                soft_cap=soft_cap,
                sinks=sinks,
                decode_only=max_queries is not None,
                max_queries=max_queries,
                writes=True,
                value_dim=None,
                chunks_only=False,
            )
        )
        for dtype, window, soft_cap, sinks, max_queries in (
            ("bfloat16", None, None, False, None),
            ("float32", 32, 30.0, True, None),
            ("bfloat16", None, None, False, 8),
        )
    ),
    GatedDelta(
        CpuDelta(
            group=2,
            key_dim=32,
            value_dim=64,
            taps=4,
            ring=16,
            recent=3,
            dtype="bfloat16",
            gates_dtype="float32",
            weights_dtype="bfloat16",
        )
    ),
    PackedAttention(
        CpuPacked(
            group=2,
            head_dim=64,
            value_dim=None,
            dtype="bfloat16",
            kv_dtype="bfloat16",
            scale=0.125,
            soft_cap=30.0,
            reach=16,
            has_bias=True,
        )
    ),
    Norm("bfloat16", "bfloat16", 1e-5),
    LogSumExp(),
    DrawTokens(),
    ProposeByNgrams(2, 4),
    GatedSilu(),
]
QUICK = (KERNELS[9],)
# Seconds for most: code for a CPU with short registers is long.
EACH_KERNEL = pytest.mark.parametrize("kernel", grid(KERNELS, QUICK.__contains__), ids=lambda kernel: kernel.name)
C_LIBRARY = {"malloc", "calloc", "free", "usleep", "memcpy", "memset", "bzero"}
"""Functions of any C library; macOS also has `bzero`, which LLVM calls there."""


def compiled(kernel: Kernel, triple: str, cpu: str) -> tuple[Any, Any]:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    return machine, optimized(kernel, machine, frozenset())


@EACH_KERNEL
def test_a_kernel_compiles_for_linux_on_arm(kernel: Kernel) -> None:
    machine, module = compiled(kernel, *LINUX)
    assert len(machine.emit_object(module)) > 1000


@EACH_KERNEL
def test_a_kernel_calls_only_existing_functions_on_a_mac(kernel: Kernel) -> None:
    machine, module = compiled(kernel, *MAC)
    text = machine.emit_assembly(module)
    defined = set(re.findall(r"^_(\w+):", text, re.MULTILINE))
    named = set(re.findall(r"[\s,]_([a-z]\w*)", text))
    assert kernel.name in defined
    assert named - defined <= C_LIBRARY
    assert {"malloc", "usleep"} <= named or isinstance(kernel, ProposeByNgrams)


def test_this_cpu_has_features() -> None:
    assert cpu_features()


@pytest.mark.parametrize("permitted", [True, False])
def test_features_that_the_system_refuses_are_not_used(permitted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: dict.fromkeys((*tile_registers.FEATURES, "fma"), True))
    monkeypatch.setattr(tile_registers, "permitted", lambda: permitted)
    cpu_features.cache_clear()
    given = cpu_features()
    cpu_features.cache_clear()
    assert given == (tile_registers.FEATURES | {"fma"} if permitted else {"fma"})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: patch.setattr(sys, "platform", "win32"), "Windows"),
        (lambda patch: patch.setattr(sys, "byteorder", "big"), f"CPUs like {platform.machine()} are not supported"),
        (lambda patch: patch.setitem(sys.modules, "llvmlite.binding", None), "llvmlite can't be loaded"),
    ],
)
def test_unsupported_machines_are_refused_with_a_reason(
    change: Callable[[pytest.MonkeyPatch], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal() is None
    change(monkeypatch)
    assert reason in (refusal() or "")
    problem = Problem(6, 2, 64, 16, np.dtype(np.float32), np.dtype(np.float32))
    chosen = choose_backend(KernelTarget("cpu"), problem)
    assert chosen.name == "reference"
    assert reason in chosen.reason
