"""Kernels that this machine compiles for itself, by name, as XLA finds them.

A kernel is a frozen description that can write itself in LLVM's language. Whoever traces a program with one registers
it on the way; whoever loads a program that another process compiled must register its kernels before. Compiled code
stays for the life of the process, as XLA has its address.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

import jax

from pallas_kernels.cpu.emit import Module

_LOCK = threading.Lock()
_KERNELS: dict[str, Kernel] = {}
_ENGINES: list[Any] = []


class Kernel(Protocol):
    """One specialised kernel. Two with the same name are the same, in any process; it can be pickled."""

    @property
    def name(self) -> str:
        """What XLA calls it: letters, digits and underscores."""

    def write(self, module: Module, features: frozenset[str]) -> None:
        """Adds the handler `name` to a module, for a CPU with these features, as LLVM calls them."""


def refusal() -> str | None:
    """Why this machine can't compile kernels, or None."""
    try:
        import llvmlite.binding  # noqa: F401
    except (ImportError, OSError) as error:  # the package, or the library in it
        return f"the package llvmlite can't be loaded ({error})"
    if sys.platform == "win32":
        return "their threads sleep by usleep, which Windows doesn't have"
    if sys.byteorder != "little" or sys.maxsize < 2**32:
        return f"CPUs like {platform.machine()} are not supported"
    return None


def call(kernel: Kernel, results: Any, *operands: jax.Array, in_place: dict[int, int] | None = None) -> Any:
    """The kernel's results, of the shapes and dtypes of `results`, in a program that is being traced. `in_place` says
    which operands are, by number, results too: where they aren't used otherwise, nothing is copied."""
    register(kernel)
    traced: Callable[..., Any] = jax.ffi.ffi_call(kernel.name, results, input_output_aliases=in_place)
    return traced(*operands)


def where_possible(kernel: Callable[..., Any], otherwise: Callable[..., Any], *operands: Any) -> Any:
    """`kernel(*operands)` in a program for a CPU that compiles kernels, `otherwise(*operands)` in any other."""
    if jax.default_backend() != "cpu" or refusal() is not None:
        return otherwise(*operands)
    return jax.lax.platform_dependent(*operands, cpu=kernel, default=otherwise)


def register(kernel: Kernel) -> None:
    """Compiles a kernel, once in a process, and tells XLA of it."""
    with _LOCK:
        if kernel.name in _KERNELS:
            return
        jax.ffi.register_ffi_target(kernel.name, _compile(kernel), platform="cpu")
        _KERNELS[kernel.name] = kernel


def kernels_in(program: str) -> list[Kernel]:
    """The kernels that the text of a compiled program names, to be registered where it is loaded."""
    with _LOCK:
        return [kernel for name, kernel in sorted(_KERNELS.items()) if f'"{name}"' in program]


def _compile(kernel: Kernel) -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(optimized(kernel, machine, cpu_features()), machine)
    engine.finalize_object()
    _ENGINES.append(engine)
    return _capsule(engine.get_function_address(kernel.name))


def optimized(kernel: Kernel, machine: Any, features: frozenset[str]) -> Any:
    """LLVM's module of a kernel for a machine with these features, which need not be this one."""
    import llvmlite.binding as llvm

    module = Module()
    kernel.write(module, features)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(parsed, builder)
    return parsed


def cpu_name() -> str:
    """What LLVM calls this machine's CPU."""
    import llvmlite.binding as llvm

    name: str = llvm.get_host_cpu_name()
    return name


@functools.cache
def cpu_features() -> frozenset[str]:
    """What this machine's CPU has, by LLVM's names."""
    import llvmlite.binding as llvm

    return frozenset(name for name, there in llvm.get_host_cpu_features().items() if there)


def _capsule(address: int) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(address, None, None)
