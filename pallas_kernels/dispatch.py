"""Chooses the backend or the kernel that computes a room's operation on a device.

A room is a folder with one operation and several backends of it. In some rooms a backend is chosen at start-up, by a
`BackendTable`. In the others, functions choose while a program is traced: NVIDIA GPUs have kernels by Triton
(`triton_kernel`), CPUs have kernels by LLVM (`on_cpu`), and the room's reference, in plain XLA, is the fallback.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import jax

from pallas_kernels import cpu
from pallas_kernels.target import CPU, KernelTarget

BackendName = Literal["reference", "xla", "cpu", "triton", "mosaic_tpu", "mosaic_gpu"]

HOPPER = (9, 0)

# In the interpreter a waiting warpgroup occupies a thread, which the warpgroup it waits for may need.
_INTERPRETER_THREADS = 8

# The platforms that a backend compiles for, and their name in messages.
_COMPILES_FOR = {
    "cpu": ((), "the CPU it runs on"),
    "triton": (("cuda", "gpu"), "NVIDIA GPUs"),
    "mosaic_gpu": (("cuda", "gpu"), "NVIDIA GPUs"),
    "mosaic_tpu": (("tpu",), "TPUs"),
}


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend, the device it compiles for, and the reason of the choice, for the log."""

    name: BackendName = "reference"
    target: KernelTarget = CPU
    reason: str = dataclasses.field(default="", compare=False)

    @property
    def interpret(self) -> bool:
        """Whether its kernels are interpreted: a CPU can't run kernels of GPUs and TPUs."""
        return self.target.platform == "cpu" and self.name not in ("reference", "xla", "cpu")


@dataclasses.dataclass(frozen=True)
class BackendTable[Module]:
    """The backends of a room, and the order in which they are tried.

    `names` lists all backends. `preferred` lists, by platform, the backends to try before the reference, the best
    first; a platform that it lacks has a CPU's order. Each backend is a module of the type `Module`. Its
    `refusal(*problem, target)` returns why it doesn't support a problem on a device that its compiler has kernels for,
    or None if it does. The reference supports every problem, so it isn't asked.
    """

    room: str
    names: tuple[BackendName, ...]
    preferred: Mapping[str, tuple[BackendName, ...]]

    def module(self, name: BackendName) -> Module:
        """Return a backend's module. It is imported when needed, as each one imports another compiler's front end."""
        file = name if name in ("reference", "xla") else f"{name}.backend"
        return cast(Module, importlib.import_module(f"pallas_kernels.{self.room}.{file}"))

    def choose(self, target: KernelTarget, *problems: tuple[Any, ...]) -> Backend:
        """Return the best backend that supports all of the problems."""
        reasons = [f"the best for {target.kind or target.platform}"]
        for name in self.preferred.get(target.platform, self.preferred.get("cpu", ())):
            why = self.refusal(name, target, *problems)
            if why is None:
                return Backend(name, target, "; ".join(reasons))
            reasons.append(f"not {name}: {why}")
        return Backend("reference", target, "; ".join(reasons))

    def check_requested(self, requested: str, target: KernelTarget, *problems: tuple[Any, ...]) -> Backend:
        """Return the backend that is requested by name.

        Raises ValueError, with the reason, if there is none of this name or it doesn't support a problem.
        """
        kind = self.room.removeprefix("paged_")
        if requested not in self.names:
            raise ValueError(f"{kind} backend {requested!r} is not built; available: {', '.join(self.names)}")
        if why := self.refusal(requested, target, *problems):
            raise ValueError(f"{kind} backend {requested!r} can't be used here: {why}")
        return Backend(requested, target, "requested")

    def refusal(self, name: BackendName, target: KernelTarget, *problems: tuple[Any, ...]) -> str | None:
        """Return why a backend doesn't support all of the problems, or None."""
        if name == "reference":
            return None
        if why := refused_device(name, target):
            return why
        module: Any = self.module(name)
        refusals = (module.refusal(*problem, target) for problem in problems)
        return next((why for why in refusals if why is not None), None)


def refused_device(name: BackendName, target: KernelTarget) -> str | None:
    """Return why the compiler of a backend has no kernels for a device, or None.

    Kernels of GPUs and TPUs are interpreted on a CPU.
    """
    if name in ("reference", "xla"):
        return None
    platforms, devices = _COMPILES_FOR[name]
    if target.platform not in (*platforms, "cpu"):
        return f"{name} compiles for {devices}, not for {target.platform}"
    if name == "cpu":
        return cpu.refusal()
    kind, on_gpu = target.kind or "this one", target.platform != "cpu" and "gpu" in platforms
    if name == "triton" and on_gpu and not has_triton(target):
        return f"triton needs an NVIDIA GPU of compute capability 8.0 (Ampere) or newer, not {kind}"
    if name == "mosaic_gpu" and on_gpu and target.capability != HOPPER:
        return f"mosaic_gpu is written for compute capability 9.0 (Hopper), not for {kind}"
    if name == "mosaic_gpu" and not on_gpu and _cpu_threads() < _INTERPRETER_THREADS:
        return (
            f"mosaic_gpu's interpreter deadlocks with fewer than {_INTERPRETER_THREADS} threads of XLA's: set "
            f"NPROC={_INTERPRETER_THREADS} in the environment"
        )
    return None


def _cpu_threads() -> int:
    """Return the number of threads that XLA uses on a CPU."""
    return int(os.environ.get("NPROC") or os.cpu_count() or 1)


def has_triton(target: KernelTarget) -> bool:
    """Return whether Triton compiles for a device: for NVIDIA GPUs from Ampere on."""
    return target.capability is not None and target.capability >= (8, 0)


def triton_kernel(room: str, name: str, target: KernelTarget) -> Callable[..., Any] | None:
    """Return a function of a room's module `triton`, for a device that Triton compiles for; else None."""
    if not has_triton(target):
        return None
    # The import stands here as only GPUs need this compiler's front end.
    module = importlib.import_module(f"pallas_kernels.{room}.triton")
    return functools.partial(getattr(module, name), interpret=Backend("triton", target).interpret)


def on_cpu(kernel: Callable[..., Any] | None, fallback: Callable[..., Any], *operands: Any) -> Any:
    """Return `kernel(*operands)` in a program for a CPU that compiles kernels, `fallback(*operands)` in any other.

    `kernel` is None if it doesn't support these operands: then every program has the fallback.
    """
    if kernel is None or jax.default_backend() != "cpu" or cpu.refusal() is not None:
        return fallback(*operands)
    return jax.lax.platform_dependent(*operands, cpu=kernel, default=fallback)
