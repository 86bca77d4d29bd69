"""Kernels for the CPU at hand, generated as LLVM IR and called by XLA."""

from pallas_kernels.cpu.compile import (
    Kernel,
    call,
    cpu_features,
    cpu_name,
    kernels_in,
    refusal,
    register,
)

__all__ = ["Kernel", "call", "cpu_features", "cpu_name", "kernels_in", "refusal", "register"]
