"""Finds the kernels in a compiled program, as jax serializes it for an NVIDIA GPU.

A serialized program is a Riegeli file in an envelope. One of its records is again a Riegeli file, whose records are
pieces of XLA's `GpuExecutableProto`. These contain thunks, the things that are launched one after another. Field 1 of a
thunk's field 1 names the instruction of the program. The thunk holds the machine code in one of two forms, which are
recognized at any depth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from pallas_kernels.gpu_code import cubin
from pallas_kernels.gpu_code.cubin import ELF, Resources
from pallas_kernels.gpu_code.riegeli import SIGNATURE, records
from pallas_kernels.gpu_code.wire import MessageField, UnreadableError, fields


def kernel_resources(serialized: bytes, instructions: Collection[str]) -> dict[str, Resources]:
    """Return the resources that the kernel of each of these instructions takes.

    Raises `UnreadableError` if the program doesn't tell them for all, or a package that reads it isn't installed.
    """
    try:
        import cramjam  # noqa: F401
        import elftools  # noqa: F401
    except ImportError as error:
        raise UnreadableError(
            f"reading the kernels of a GPU needs the package {error.name}, which the extras cuda12 and cuda13 install"
        ) from error
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
    """Yield every kernel in a message that one of the instructions launches, with that instruction."""
    pending: list[tuple[MessageField, str | None]] = [(MessageField(0, 0, len(data)), None)]
    while pending:
        message, instruction = pending.pop()
        inside = _fields(data, message)
        last = {field.number: field for field in inside}
        name = _text(data, _last(data, last.get(1)).get(1))
        instruction = name if name in instructions else instruction
        kernel = _kernel(data, last) if instruction else None
        if instruction and kernel:
            yield instruction, kernel
        else:
            pending += [(field, instruction) for field in inside if _holds_code(data, field)]


def _kernel(data: bytes, message: dict[int, MessageField]) -> Resources | None:
    """Return the resources of the kernel in a message, or None if the message is no kernel."""
    if _is_code(data, message.get(8)):
        # This is Mosaic GPU's form.
        code, name, shared = message[8], message.get(9), message.get(10)
    else:
        # This is Triton's form: a CustomKernelProto, whose specification has the code in a message of its own.
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


def _fields(data: bytes, field: MessageField) -> list[MessageField]:
    """Return the fields inside a field, or none if it is no message."""
    try:
        return list(fields(data, field.start, field.end)) if field.value is None else []
    except UnreadableError:
        return []


def _last(data: bytes, field: MessageField | None) -> dict[int, MessageField]:
    """Return the last field of each number inside a field."""
    return {} if field is None else {inner.number: inner for inner in _fields(data, field)}


def _text(data: bytes, field: MessageField | None) -> str:
    return "" if field is None else data[field.start : field.end].decode(errors="replace")


def _is_code(data: bytes, field: MessageField | None) -> bool:
    return field is not None and data.startswith(ELF, field.start, field.end)


def _holds_code(data: bytes, field: MessageField) -> bool:
    return data.find(ELF, field.start, field.end) > field.start
