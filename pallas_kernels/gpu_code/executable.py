"""Finds the kernels in a compiled program, as jax serializes it for an NVIDIA GPU.

That is a Riegeli file in an envelope; one of its records is a Riegeli file again, whose records are pieces of XLA's
`GpuExecutableProto`. Somewhere in it stand thunks, what is launched one after the other. One says in field 1 of its
field 1 which instruction of the program it is, and holds the machine code in one of two shapes, which are recognized
wherever they stand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from pallas_kernels.gpu_code import cubin
from pallas_kernels.gpu_code.cubin import ELF, Resources
from pallas_kernels.gpu_code.riegeli import SIGNATURE, records
from pallas_kernels.gpu_code.wire import Field, UnreadableError, fields


def kernel_resources(serialized: bytes, instructions: Collection[str]) -> dict[str, Resources]:
    """What the kernel of each of these instructions takes. Raises `UnreadableError` where that isn't known of all."""
    envelope = serialized.find(SIGNATURE)
    if envelope < 0:
        raise UnreadableError("a serialized program holds no Riegeli file")
    found: dict[str, Resources] = {}
    for record in records(serialized[envelope:]):
        for piece in records(record) if record.startswith(SIGNATURE) else ():
            for instruction, resources in _kernels(piece, instructions):
                if found.setdefault(instruction, resources) != resources:
                    raise UnreadableError(f"{instruction} has two kernels")
    if missing := sorted(set(instructions) - found.keys()):
        raise UnreadableError(f"{len(missing)} of {len(instructions)} calls have no machine code, such as {missing[0]}")
    return found


def _kernels(data: bytes, instructions: Collection[str]) -> Iterator[tuple[str, Resources]]:
    """Every kernel in a message that one of the instructions launches, and which."""
    waiting: list[tuple[Field, str | None]] = [(Field(0, 0, len(data)), None)]
    while waiting:
        message, instruction = waiting.pop()
        inside = _fields(data, message)
        last = {field.number: field for field in inside}
        name = _text(data, _last(data, last.get(1)).get(1))
        instruction = name if name in instructions else instruction
        kernel = _kernel(data, last) if instruction else None
        if instruction and kernel:
            yield instruction, kernel
        else:
            waiting += [(field, instruction) for field in inside if _holds_code(data, field)]


def _kernel(data: bytes, message: dict[int, Field]) -> Resources | None:
    """What a message that is a kernel says of it."""
    if _is_code(data, message.get(8)):
        # Mosaic GPU's.
        code, name, shared = message[8], message.get(9), message.get(10)
    else:
        # Triton's: a CustomKernelProto, in whose specification the code has a message of its own.
        specification = _last(data, message.get(2))
        inner = _last(data, specification.get(2)).get(1)
        if inner is None or not _is_code(data, inner):
            return None
        code, name, shared = inner, specification.get(4), message.get(6)
    resources = cubin.resources(data[code.start : code.end], _text(data, name))
    at_launch = 0 if shared is None else shared.value
    if at_launch is None:
        raise UnreadableError("a kernel's shared memory is no integer")
    return dataclasses.replace(resources, shared_bytes=resources.shared_bytes + at_launch)


def _fields(data: bytes, field: Field) -> list[Field]:
    """The fields inside one; none where it is no message."""
    try:
        return list(fields(data, field.start, field.end)) if field.value is None else []
    except UnreadableError:
        return []


def _last(data: bytes, field: Field | None) -> dict[int, Field]:
    """The fields inside one by number, of each the last."""
    return {} if field is None else {inner.number: inner for inner in _fields(data, field)}


def _text(data: bytes, field: Field | None) -> str:
    return "" if field is None else data[field.start : field.end].decode(errors="replace")


def _is_code(data: bytes, field: Field | None) -> bool:
    return field is not None and data.startswith(ELF, field.start, field.end)


def _holds_code(data: bytes, field: Field) -> bool:
    return data.find(ELF, field.start, field.end) > field.start
