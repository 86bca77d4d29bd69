"""What a kernel takes of a GPU, from its machine code: an ELF file of NVIDIA's.

There is no public reference for the attributes in it. What is read here is what `ptxas -v` says of the same code.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

from pallas_kernels.gpu_code.wire import UnreadableError, take

ELF = b"\x7fELF"

# Identification, machine, where the section headers stand, flags, number of section headers, which has their names.
_HEADER = struct.Struct("<16s2xH20xQI8xHH")
_64_BITS_LITTLE_ENDIAN = b"\x02\x01"
_CUDA = 190
# Name, type, offset, size, section that this one belongs with.
_SECTION = struct.Struct("<II16xQQI20x")
_WITHOUT_DATA = 8
# Name, kind.
_SYMBOL = struct.Struct("<IB19x")
_FUNCTION = 2

# Of attributes: their form, by which the last has a size of its own and others have two bytes; and their numbers.
_FORMS, _SIZED = (1, 2, 3, 4), 4
_REGISTERS, _STACK = 0x2F, 0x12
_THREADS = (0x10, 0x05)  # all that a block has, or may have: a kernel says one of them

# From Hopper on, a kernel's own shared memory begins with what the system takes.
_HOPPER, _SYSTEM_SHARED_BYTES = 90, 1024


@dataclasses.dataclass(frozen=True)
class Resources:
    """`registers` and `stack_bytes` of each thread, `shared_bytes` and `threads` of each block.

    Registers are those that a thread starts with. The stack, also of functions that are called, lies in local memory:
    what is spilled is there. Shared memory is without what the system takes. `threads` is None where nothing says it.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    threads: int | None


class _Section(NamedTuple):
    data: bytes
    size: int
    link: int


def resources(cubin: bytes, kernel: str) -> Resources:
    """What a kernel of that machine code takes; of shared memory, what is fixed before a launch.

    Raises `UnreadableError`.
    """
    identification, machine, at, flags, count, names = _HEADER.unpack(take(cubin, 0, _HEADER.size))
    if not identification.startswith(ELF + _64_BITS_LITTLE_ENDIAN) or machine != _CUDA:
        raise UnreadableError("a kernel's code isn't NVIDIA's")
    sections = _sections(cubin, at, count, names)
    function = struct.pack("<I", _symbol(sections, kernel))
    of_function = {
        number: int.from_bytes(value[4:], "little")
        for number, value in _attributes(sections, ".nv.info")
        if value.startswith(function)
    }
    of_block = dict(_attributes(sections, f".nv.info.{kernel}"))
    if not {_REGISTERS, _STACK} <= of_function.keys():
        raise UnreadableError(f"the code of {kernel} doesn't say its registers and its stack")
    threads = next((of_block[number] for number in _THREADS if number in of_block), None)
    shared = sections.get(f".nv.shared.{kernel}")
    return Resources(
        registers=of_function[_REGISTERS],
        stack_bytes=of_function[_STACK],
        shared_bytes=_without_system(shared.size, _architecture(identification, flags)) if shared else 0,
        threads=math.prod(struct.unpack("<3I", take(threads, 0, 12))) if threads is not None else None,
    )


def _sections(cubin: bytes, at: int, count: int, names: int) -> dict[str, _Section]:
    headers = [_SECTION.unpack(take(cubin, at + i * _SECTION.size, _SECTION.size)) for i in range(count)]
    if names >= count:
        raise UnreadableError("a kernel's code has no names of sections")
    found = {}
    for name, kind, offset, size, link in headers:
        data = b"" if kind == _WITHOUT_DATA else take(cubin, offset, size)
        found[_text(cubin, headers[names][2] + name)] = _Section(data, size, link)
    return found


def _symbol(sections: dict[str, _Section], kernel: str) -> int:
    """Which symbol a kernel is."""
    symbols, strings = sections.get(".symtab"), sections.get(".strtab")
    if symbols is not None and strings is not None and len(symbols.data) % _SYMBOL.size == 0:
        for index, (name, kind) in enumerate(_SYMBOL.iter_unpack(symbols.data)):
            if kind & 15 == _FUNCTION and _text(strings.data, name) == kernel:
                return index
    raise UnreadableError(f"there is no {kernel} in its code")


def _attributes(sections: dict[str, _Section], name: str) -> Iterator[tuple[int, bytes]]:
    if name not in sections:
        raise UnreadableError(f"a kernel's code has no {name}")
    data, at = sections[name].data, 0
    while at < len(data):
        form, number, *value = take(data, at, 4)
        at += 4
        if form not in _FORMS:
            raise UnreadableError(f"an attribute of a kernel in form {form}")
        size = int.from_bytes(value, "little") if form == _SIZED else 0
        yield number, take(data, at, size) if form == _SIZED else bytes(value)
        at += size


def _without_system(shared_bytes: int, architecture: int) -> int:
    own = shared_bytes - (_SYSTEM_SHARED_BYTES if architecture >= _HOPPER else 0)
    if own < 0:
        raise UnreadableError(f"{shared_bytes} bytes of shared memory for sm_{architecture}")
    return own


def _architecture(identification: bytes, flags: int) -> int:
    """Such as 90. Where it stands depends on the version of the ABI (EF_CUDA_SM in LLVM's BinaryFormat/ELF.h)."""
    version = identification[8]
    if version not in (7, 8):
        raise UnreadableError(f"a kernel's code of ABI version {version}")
    return flags & 0xFF if version == 7 else flags >> 8 & 0xFF


def _text(data: bytes, at: int) -> str:
    end = data.find(b"\0", at)
    if at > len(data) or end < 0:
        raise UnreadableError("a name in a kernel's code has no end")
    return data[at:end].decode(errors="replace")
