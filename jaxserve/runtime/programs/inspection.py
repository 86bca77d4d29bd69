"""Reads a compiled program: its memory, its collectives and kernels, what a kernel of ours takes of a core, and whether
the KV pool stays in its place.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxserve.runtime.devices.mesh import device_bytes
from jaxserve.runtime.programs.builder import ProgramBuilder
from jaxserve.runtime.programs.program_set import Key
from pallas_kernels.gpu_code.cubin import Resources
from pallas_kernels.gpu_code.executable import kernel_resources
from pallas_kernels.gpu_code.wire import UnreadableError

# What may give an array of the pool's size: names for one that is there, and writing into it. A kernel may where it
# says that its output is its operand.
_IN_PLACE = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "while", "call", "fusion", "scatter", "dynamic-update-slice",
    "conditional", "optimization-barrier", "async-start", "async-update", "async-done",
}  # fmt: skip
# A smaller pool may happen to be as large as some activation.
_SMALL_POOL = 2**24
_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
# Targets of custom calls that are our kernels, by what they were written in; a name goes with each.
_KERNELS = {"__gpu$xla.gpu.triton": "triton", "mosaic_gpu": "mosaic gpu", "tpu_custom_call": "mosaic tpu"}
_ON_A_GPU = {"triton", "mosaic gpu"}
# What jax calls the call of a kernel.
_CALLS = ("pallas_call", "mpmd_map")
# Those that a CPU compiles for itself carry their name in the target, some with a hash of their facts.
_LLVM = re.compile(r"llvm_(?P<name>\w+?)(_[0-9a-f]{16})?")
_LIBRARIES = re.compile(r"__(cublas|cudnn)[\w$.]*")

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<types>.*?) (?P<opcode>[a-z][a-z0-9-]*)\(")
_ARRAY = re.compile(r"\b(?:pred|[a-z]+\d+\w*)\[(?P<dims>[\d,]*)\]")
_TARGET = re.compile(r'custom_call_target="(?P<target>[^"]+)"')
_OP_NAME = re.compile(r'op_name="(?P<name>[^"]+)"')
# Where in VMEM, which is memory space 1, a TPU's kernel may have its own, and how far it reaches from there.
_VMEM = {
    name: re.compile(rf'"{name}":\[{{"memory_space":"1","offset":"(?P<offset>\d+)","size":"(?P<size>\d+)"}}\]')
    for name in ("scoped_memory_configs", "used_scoped_memory_configs")
}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program, also of those inside fusions: `elements` are those of the largest array it gives.

    `kernel` names what a custom call calls, where that is a kernel of ours or of a library. Of ours on a GPU or a TPU,
    `language` is what it was written in, and `vmem_bytes` what a TPU's compiler says it needs.
    """

    opcode: str
    elements: int
    name: str
    aliased: bool = False
    kernel: str | None = None
    language: str | None = None
    vmem_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """What one kernel of ours takes of a core, in all `calls` of it in a program; None is what isn't known.

    On a GPU, `registers` and `stack_bytes` are those of a thread, `shared_bytes` and `threads` those of a block
    (`gpu_code.cubin.Resources`): a stack is slow memory, and registers that were spilled are in it. On a TPU,
    `vmem_bytes` is what the kernel needs of VMEM for itself.
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
    """What became of one program, on each device of its mesh; `fault` says why it can't be used.

    `temp_bytes` is working memory, `alias_bytes` what is changed in place. Counts are by name. `own_kernels` are those
    of ours that are on a GPU or a TPU; where what they take can't be read, `unread` says why.
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


def compile_and_read(builder: ProgramBuilder, key: Key) -> tuple[ProgramReport, jax.stages.Compiled | None]:
    """Compile one program and say what it is; a program that doesn't build is a report with a fault."""
    start = time.monotonic()
    try:
        compiled = builder.compile(key)
    except Exception as error:  # what a compiler may raise has no common base
        return ProgramReport(str(key), time.monotonic() - start, fault=_first_line(error)), None
    return read(builder, key, compiled, time.monotonic() - start), compiled


def read(builder: ProgramBuilder, key: Key, compiled: Any, seconds: float) -> ProgramReport:
    """The report of a program that was built."""
    memory = compiled.memory_analysis()
    found = list(instructions(compiled.as_text()))
    opcodes = collections.Counter(one.opcode.removesuffix("-start") for one in found)
    own_kernels, unread = own_kernels_of(compiled, found)
    return ProgramReport(
        name=str(key),
        seconds=seconds,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        collectives={name: opcodes[name] for name in _COLLECTIVES if name in opcodes and builder.mesh.size > 1},
        kernels=dict(collections.Counter(one.kernel for one in found if one.kernel is not None)),
        fault=_copied(builder, memory, found),
        own_kernels=own_kernels,
        unread=unread,
    )


def own_kernels_of(compiled: Any, found: Iterable[Instruction]) -> tuple[tuple[KernelReport, ...], str | None]:
    """What the kernels of ours among a program's instructions take, and why that can't be read, where it can't."""
    calls = [one for one in found if one.language is not None]
    on_gpu = [one.name for one in calls if one.language in _ON_A_GPU]
    taken: Mapping[str, Resources] = {}
    unread = None
    if on_gpu:
        try:
            taken = kernel_resources(_serialized(compiled), on_gpu)
        except UnreadableError as error:
            unread = str(error)
    counts = collections.Counter((one.kernel or "", taken.get(one.name), one.vmem_bytes) for one in calls)
    reports = tuple(
        KernelReport(kernel, count, **(dataclasses.asdict(resources) if resources else {}), vmem_bytes=vmem_bytes)
        for (kernel, resources, vmem_bytes), count in counts.items()
    )
    return reports, unread


def instructions(text: str) -> Iterator[Instruction]:
    """The instructions of a compiled program's text."""
    for line in text.split("\n"):
        if found := _INSTRUCTION.match(line):
            elements = max(map(_elements, _ARRAY.finditer(found["types"])), default=0)
            one = Instruction(found["opcode"], elements, found["name"])
            yield _custom_call(one, line) if one.opcode == "custom-call" else one


def _copied(builder: ProgramBuilder, memory: Any, found: list[Instruction]) -> str | None:
    """Where the state isn't changed in place, how that shows."""
    sizes = builder.mesh.shape
    state = device_bytes(builder.state_specs, sizes)
    if memory.alias_size_in_bytes < state:
        return f"the state is copied: {memory.alias_size_in_bytes} of its {state} bytes are aliased"
    pools = jax.tree.leaves(builder.state_specs.kv)
    # As many elements as the pool has, in whatever type and order, are a copy of it, if there is memory for one.
    smallest = min(device_bytes(pool, sizes) for pool in pools)
    if smallest < _SMALL_POOL or memory.temp_size_in_bytes < smallest:
        return None
    elements = {device_bytes(pool, sizes) // pool.dtype.itemsize for pool in pools}
    copies = collections.Counter(
        one.opcode for one in found if one.elements in elements and one.opcode not in _IN_PLACE and not one.aliased
    )
    if copies:
        return "the KV pool is copied: " + ", ".join(f"{count} {opcode}" for opcode, count in copies.items())
    return None


def _custom_call(one: Instruction, line: str) -> Instruction:
    target = found["target"] if (found := _TARGET.search(line)) else ""
    language = next((name for prefix, name in _KERNELS.items() if target.startswith(prefix)), None)
    return dataclasses.replace(
        one,
        aliased="output_to_operand_aliasing" in line,
        kernel=_library(target) if language is None else _own(line, language),
        language=language,
        vmem_bytes=_vmem(line) if language == "mosaic tpu" else None,
    )


def _vmem(line: str) -> int | None:
    given, used = (pattern.search(line) for pattern in _VMEM.values())
    if given is None or used is None:
        return None
    # What is used is counted from the start of VMEM, where arrays of the program lie that the kernel doesn't have.
    own = int(used["offset"]) + int(used["size"]) - int(given["offset"])
    return own if own >= 0 else None


def _own(line: str, language: str) -> str:
    """The name that a kernel of ours was given, which stands before the call of it."""
    parts = name["name"].split("/") if (name := _OP_NAME.search(line)) else []
    return f"{parts[-2]} ({language})" if len(parts) > 1 and parts[-1].startswith(_CALLS) else language


def _library(target: str) -> str | None:
    if own_code := _LLVM.fullmatch(target):
        return f"{own_code['name']} (llvm)"
    return target.strip("_").replace("$", " ") if _LIBRARIES.fullmatch(target) else None


def _serialized(compiled: Any) -> bytes:
    try:
        return compiled.runtime_executable().serialize()
    except Exception as error:  # what a runtime may raise has no common base
        raise UnreadableError(_first_line(error)) from error


def _elements(array: re.Match[str]) -> int:
    return math.prod(int(size) for size in array["dims"].split(",") if size)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error).strip() else repr(error)
