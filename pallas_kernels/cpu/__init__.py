"""Kernels for the CPU at hand, written in LLVM's language and called by XLA."""

from pallas_kernels.cpu.compile import (
    Kernel,
    call,
    cpu_features,
    cpu_name,
    kernels_in,
    refusal,
    register,
    where_possible,
)

__all__ = [
    "Kernel",
    "call",
    "cpu_features",
    "cpu_name",
    "kernels_in",
    "refusal",
    "register",
    "where_possible",
]
