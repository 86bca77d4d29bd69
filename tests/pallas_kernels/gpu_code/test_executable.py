"""Reads kernels of a program that jax 0.12 compiled for an H200 (`scripts/make_gpu_code.py`), whole and damaged."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from pallas_kernels.gpu_code.cubin import Resources
from pallas_kernels.gpu_code.executable import kernel_resources
from pallas_kernels.gpu_code.riegeli import SIGNATURE
from pallas_kernels.gpu_code.wire import UnreadableError

PROGRAM = (Path(__file__).parents[2] / "fixtures" / "gpu_code.bin").read_bytes()
DOUBLING = Resources(registers=40, stack_bytes=0, shared_bytes=0, threads=128)
KERNELS = {
    "pallas_call.3": DOUBLING,
    # One warp with 64 x 64 sums: it uses all registers, and spills. Operands go through shared memory.
    "pallas_call.4": Resources(registers=255, stack_bytes=176, shared_bytes=20480, threads=32),
    # The array, a barrier, and a byte that Mosaic GPU declares.
    "mpmd_map.1": Resources(registers=8, stack_bytes=0, shared_bytes=64 * 64 * 4 + 8 + 1, threads=128),
    "pallas_call.5": DOUBLING,
}


def test_each_call_has_its_kernel() -> None:
    assert kernel_resources(PROGRAM, KERNELS) == KERNELS


def test_only_the_given_calls_are_read() -> None:
    assert kernel_resources(PROGRAM, ["mpmd_map.1"]) == {"mpmd_map.1": KERNELS["mpmd_map.1"]}


def test_a_call_without_a_kernel_is_an_error() -> None:
    with pytest.raises(UnreadableError, match=r"2 of 6 calls have no machine code, such as pallas_call\.6"):
        kernel_resources(PROGRAM, [*KERNELS, "pallas_call.6", "pallas_call.7"])


@pytest.mark.parametrize("package", ["cramjam", "elftools"])
def test_a_package_that_is_not_installed_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnreadableError, match=f"needs the package {package}, which the extras cuda12 and cuda13"):
        kernel_resources(PROGRAM, KERNELS)


def test_bytes_without_a_program_are_an_error() -> None:
    with pytest.raises(UnreadableError, match="no Riegeli file"):
        kernel_resources(PROGRAM[: PROGRAM.index(SIGNATURE)], KERNELS)


def test_a_truncated_program_is_an_error() -> None:
    for end in random.Random(0).sample(range(len(PROGRAM)), 200):
        with pytest.raises(UnreadableError):
            kernel_resources(PROGRAM[:end], KERNELS)


def test_damage_raises_no_other_error() -> None:
    draw = random.Random(0)
    refused = 0
    for _ in range(200):
        damaged = bytearray(PROGRAM)
        for at in draw.sample(range(len(damaged)), 20):
            damaged[at] = draw.randrange(256)
        try:
            kernel_resources(bytes(damaged), KERNELS)
        except UnreadableError:
            refused += 1
    assert refused > 100
