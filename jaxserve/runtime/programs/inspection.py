"""Inspects a compiled program: its memory, its collectives and kernels, the resources that our own kernels use, and
whether it updates the KV pool in place.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxserve.runtime.devices.mesh import GPU, device_bytes, platform_of
from jaxserve.runtime.programs.builder import MeshProgramBuilder, ProgramBuilder
from jaxserve.runtime.programs.cost import ProgramCost, program_cost
from jaxserve.runtime.programs.hlo import HloModule, Instruction, Tables
from jaxserve.runtime.programs.kernel_names import kernel_language, kernel_name
from jaxserve.runtime.step.program import ProgramKey
from pallas_kernels.gpu_code.cubin import Resources
from pallas_kernels.gpu_code.executable import kernel_resources
from pallas_kernels.gpu_code.wire import UnreadableError

# Operations that may output an array of the pool's size without copying the pool: they pass one on or write into it.
# A custom call may as well if it declares that its output aliases an operand.
_IN_PLACE = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "while", "call", "fusion", "scatter", "dynamic-update-slice",
    "conditional", "optimization-barrier", "async-start", "async-update", "async-done",
}  # fmt: skip
# A pool smaller than this many bytes is not checked: some activation may happen to have the same size.
_SMALL_POOL = 2**24
_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "ragged-all-to-all", "collective-permute", "reduce-scatter")
_ON_A_GPU = {"triton", "mosaic gpu"}
# The parts of VMEM (memory space 1) that a TPU kernel was given and that it uses.
_VMEM = {
    name: re.compile(rf'"{name}":\[{{"memory_space":"1","offset":"(?P<offset>\d+)","size":"(?P<size>\d+)"}}\]')
    for name in ("scoped_memory_configs", "used_scoped_memory_configs")
}


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """The resources of one kernel of ours, and how many `calls` of it a program has; None stands for unknown.

    On a GPU, `registers` and `stack_bytes` are per thread, `shared_bytes` and `threads` per block
    (`gpu_code.cubin.Resources`). The stack is slow memory and holds the spilled registers. On a TPU, `vmem_bytes` is
    the VMEM that the kernel itself needs.
    """

    kernel: str
    calls: int
    registers: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int | None = None
    threads: int | None = None
    vmem_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """How one program turned out, on each device of its mesh; `fault` says why it can't be used.

    `temp_bytes` is its working memory, `alias_bytes` the memory that it updates in place. `collectives` and `kernels`
    are counts by name. `own_kernels` are our kernels on a GPU or a TPU; `unread` says why their resources are unknown.
    `cost` is None for a CPU's program.
    """

    name: str
    seconds: float
    temp_bytes: int = 0
    alias_bytes: int = 0
    collectives: Mapping[str, int] = dataclasses.field(default_factory=dict)
    kernels: Mapping[str, int] = dataclasses.field(default_factory=dict)
    fault: str | None = None
    own_kernels: Sequence[KernelReport] = ()
    unread: str | None = None
    cost: ProgramCost | None = None


def compile_and_inspect(
    builder: MeshProgramBuilder, key: ProgramKey, *, attached: bool = False
) -> tuple[ProgramReport, jax.stages.Compiled | None]:
    """Compile one program and report on it; if it doesn't build, the report has a fault and the program is None.

    A program that isn't for an `attached` device is never run or kept, and so XLA is asked for its thunks as well.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) if not attached and platform_of(builder.mesh) in GPU else None
        try:
            compiled = builder.compile(key, dump)
        except Exception as error:  # the errors of compilers have no common base class
            return ProgramReport(str(key), time.monotonic() - start, fault=_first_line(error)), None
        return inspect_program(builder, key, compiled, time.monotonic() - start, dump), compiled


def inspect_program(
    builder: MeshProgramBuilder, key: ProgramKey, compiled: Any, seconds: float, dump: Path | None = None
) -> ProgramReport:
    """Return the report of a compiled program. `dump` is the folder that XLA wrote it to."""
    memory = compiled.memory_analysis()
    module = HloModule(compiled.as_text())
    found = module.instructions
    opcodes = collections.Counter(one.opcode.removesuffix("-start") for one in found)
    own_kernels, unread = own_kernels_of(compiled, found)
    return ProgramReport(
        name=str(key),
        seconds=seconds,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        collectives={name: opcodes[name] for name in _COLLECTIVES if name in opcodes and builder.mesh.size > 1},
        kernels=dict(collections.Counter(name for one in found if (name := kernel_name(one)))),
        fault=_copied(builder, memory, found),
        own_kernels=own_kernels,
        unread=unread,
        cost=None if platform_of(builder.mesh) == "cpu" else program_cost(module, _tables(builder), dump),
    )


def attached_cost(builder: MeshProgramBuilder, compiled: Any) -> ProgramCost:
    """Return the cost of a compiled program, without how the host launches it."""
    return program_cost(HloModule(compiled.as_text()), _tables(builder), None)


def _tables(builder: MeshProgramBuilder) -> Tables:
    if not isinstance(builder, ProgramBuilder):
        return Tables(frozenset(), frozenset())

    def sizes(tree: Any) -> frozenset[int]:
        return frozenset(device_bytes(array, builder.mesh.shape) for array in jax.tree.leaves(tree))

    return Tables(sizes(builder.state_specs.request_arrays), sizes(builder.state_specs))


def own_kernels_of(compiled: Any, found: Iterable[Instruction]) -> tuple[tuple[KernelReport, ...], str | None]:
    """Return the resources of our own kernels in a program, and why they can't be read, or None."""
    calls = [(one, language) for one in found if (language := kernel_language(one))]
    on_gpu = [one.name for one, language in calls if language in _ON_A_GPU]
    taken: Mapping[str, Resources] = {}
    unread = None
    if on_gpu:
        try:
            taken = kernel_resources(_serialized(compiled), on_gpu)
        except UnreadableError as error:
            unread = str(error)
    counts = collections.Counter((kernel_name(one) or "", taken.get(one.name), _vmem(one)) for one, _ in calls)
    reports = tuple(
        KernelReport(kernel, count, **(dataclasses.asdict(resources) if resources else {}), vmem_bytes=vmem_bytes)
        for (kernel, resources, vmem_bytes), count in counts.items()
    )
    return reports, unread


def _copied(builder: MeshProgramBuilder, memory: Any, found: list[Instruction]) -> str | None:
    """Return how the program copies the state or the KV pool, or None if it updates both in place, or has none."""
    if not isinstance(builder, ProgramBuilder):
        return None
    sizes = builder.mesh.shape
    state = device_bytes(builder.state_specs, sizes)
    if memory.alias_size_in_bytes < state:
        return f"the state is copied: {memory.alias_size_in_bytes} of its {state} bytes are aliased"
    # An output with as many elements as a pool, of any type and shape, is a copy of it if temp memory can hold one.
    pools = {device_bytes(pool, sizes): pool.dtype.itemsize for pool in builder.state_specs.request_arrays}
    elements = {
        nbytes // itemsize for nbytes, itemsize in pools.items() if _SMALL_POOL <= nbytes <= memory.temp_size_in_bytes
    }
    copies = collections.Counter(
        one.opcode for one in found if one.elements in elements and one.opcode not in _IN_PLACE and not one.aliased
    )
    if copies:
        return "the KV pool is copied: " + ", ".join(f"{count} {opcode}" for opcode, count in copies.items())
    return None


def _vmem(one: Instruction) -> int | None:
    """Return the VMEM that a kernel on a TPU needs, as its compiler says."""
    given, used = (pattern.search(one.line) for pattern in _VMEM.values())
    if given is None or used is None:
        return None
    # The used part is counted from the start of VMEM, where the program keeps arrays that aren't the kernel's.
    own = int(used["offset"]) + int(used["size"]) - int(given["offset"])
    return own if own >= 0 else None


def _serialized(compiled: Any) -> bytes:
    try:
        return compiled.runtime_executable().serialize()
    except Exception as error:  # the errors of runtimes have no common base class
        raise UnreadableError(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error).strip() else repr(error)
