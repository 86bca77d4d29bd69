"""Compiles kernels for this machine's CPU and registers them by name, so that XLA finds them.

A kernel is a frozen description that can write itself as LLVM IR. Tracing a program registers the kernels it calls.
Before a program that another process compiled is loaded, its kernels must be registered, from the code that is kept
with it. Code stays for the life of the process, because XLA keeps its address.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from pallas_kernels.cpu import tile_registers
from pallas_kernels.cpu.emit import Module

_LOCK = threading.Lock()
_KERNELS: dict[str, tuple[Kernel, Code]] = {}
_ENGINES: list[Any] = []


class Code(NamedTuple):
    """The code of a kernel: an object file, for a process that may use these features of the CPU."""

    features: frozenset[str]
    object_file: bytes


class Kernel(Protocol):
    """One specialised kernel. Kernels of the same name are equal in any process; a kernel can be pickled."""

    @property
    def name(self) -> str:
        """XLA's name of the kernel: letters, digits and underscores."""

    def write(self, module: Module, features: frozenset[str]) -> None:
        """Add the handler `name` to a module, for a CPU with these features (LLVM's names)."""


def refusal() -> str | None:
    """Return why this machine can't compile kernels, or None."""
    try:
        import llvmlite.binding  # noqa: F401
    except (ImportError, OSError) as error:  # the package, or the library in it
        return f"the package llvmlite can't be loaded ({error})"
    if sys.platform == "win32":
        return "the kernels' threads sleep by usleep, which Windows doesn't have"
    if sys.byteorder != "little" or sys.maxsize < 2**32:
        return f"CPUs like {platform.machine()} are not supported: kernels need 64 bits, little-endian"
    return None


def call(kernel: Kernel, results: Any, *operands: jax.Array, in_place: dict[int, int] | None = None) -> Any:
    """Return the kernel's results, of the shapes and dtypes of `results`, in a program that is being traced.

    `in_place` maps numbers of operands to numbers of the results that overwrite them. An operand without any other use
    is not copied.
    """
    register(kernel)
    traced: Callable[..., Any] = jax.ffi.ffi_call(kernel.name, results, input_output_aliases=in_place)
    # Without the barrier, XLA copies an operand that the program has reshaped before.
    written = jax.lax.optimization_barrier({i: operands[i] for i in in_place or ()})
    return traced(*(written.get(i, x) for i, x in enumerate(operands)))


def register(kernel: Kernel, code: Code | None = None) -> None:
    """Register a kernel with XLA, once in a process.

    `code` comes from `kernels_in` in a process on the same CPU. Without it, or if this process may use other features
    of the CPU, the kernel is compiled now.
    """
    with _LOCK:
        if kernel.name in _KERNELS:
            return
        features = cpu_features()  # also asks for the tile registers that kept code may use
        if code is None or code.features != features:
            machine = _machine()
            code = Code(features, machine.emit_object(optimized(kernel, machine, features)))
        jax.ffi.register_ffi_target(kernel.name, _linked(kernel.name, code.object_file), platform="cpu")
        _KERNELS[kernel.name] = kernel, code


def kernels_in(program: str) -> list[tuple[Kernel, Code]]:
    """Return the kernels that the text of a compiled program names, with their code: a process that loads it must
    register them."""
    with _LOCK:
        return [known for name, known in sorted(_KERNELS.items()) if f'"{name}"' in program]


def _machine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )


def _linked(name: str, object_file: bytes) -> Any:
    """Load an object file into this process and return the capsule of its function `name`."""
    import llvmlite.binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(object_file))
    engine.finalize_object()
    _ENGINES.append(engine)
    return _capsule(engine.get_function_address(name))


def optimized(kernel: Kernel, machine: Any, features: frozenset[str]) -> Any:
    """Return LLVM's optimized module of a kernel, for a machine with these features, not necessarily this one."""
    import llvmlite.binding as llvm

    module = Module()
    kernel.write(module, features)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(parsed, builder)
    return parsed


def cpu_name() -> str:
    """Return LLVM's name of this machine's CPU."""
    import llvmlite.binding as llvm

    name: str = llvm.get_host_cpu_name()
    return name


@functools.cache
def cpu_features() -> frozenset[str]:
    """Return the features of this machine's CPU that this process may use, by LLVM's names."""
    import llvmlite.binding as llvm

    features = frozenset(name for name, there in llvm.get_host_cpu_features().items() if there)
    return features if tile_registers.permitted() else features - tile_registers.FEATURES


def _capsule(address: int) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(address, None, None)
