"""Reads which resources of a GPU a kernel takes, from its machine code: an ELF file of NVIDIA's.

The attributes in it have no public reference. The numbers read here equal those that `ptxas -v` prints for the code.
"""

from __future__ import annotations

import dataclasses
import io
import math
import struct
from collections.abc import Iterator
from typing import Any

from pallas_kernels.gpu_code.wire import UnreadableError, take

ELF = b"\x7fELF"
_SECTION_HEADER_BYTES = 64

# The formats of attributes, which say whether a value has a size of its own or two bytes; then their numbers.
_FORMATS, _SIZED = (1, 2, 3, 4), 4
_REGISTERS, _STACK = 0x2F, 0x12
_THREADS = (0x10, 0x05)  # all that a block has, or may have: a kernel has one of them

# From Hopper on, the system takes the first bytes of a kernel's shared memory.
_HOPPER, _SYSTEM_SHARED_BYTES = 90, 1024


@dataclasses.dataclass(frozen=True)
class Resources:
    """`registers` and `stack_bytes` of each thread, `shared_bytes` and `threads` of each block.

    Registers are those that a thread starts with. The stack, which includes that of called functions, lies in local
    memory; spilled registers are in it. Shared memory excludes the system's bytes. `threads` is None if the code
    doesn't tell it.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    threads: int | None


def resources(cubin: bytes, kernel: str) -> Resources:
    """Return the resources that a kernel of this machine code takes; shared memory that a launch adds isn't counted.

    Raises `UnreadableError`.
    """
    from elftools.elf.elffile import ELFFile

    try:
        return _read(ELFFile(io.BytesIO(cubin)), cubin, kernel)
    except UnreadableError:
        raise
    except Exception as error:  # what pyelftools raises for damaged files has no common base
        raise UnreadableError(f"the code of {kernel} can't be read: {type(error).__name__}: {error}") from error


def _read(elf: Any, cubin: bytes, kernel: str) -> Resources:
    # Headers of size 0, and a number of sections that the first section gives, would let pyelftools read without end.
    if elf["e_machine"] != "EM_CUDA" or elf["e_shentsize"] != _SECTION_HEADER_BYTES or elf["e_shnum"] == 0:
        raise UnreadableError(f"the code of {kernel} isn't NVIDIA's")
    sections = {section.name: section for section in elf.iter_sections()}
    symbols = enumerate(sections[".symtab"].iter_symbols())
    index = next((i for i, one in symbols if one.name == kernel and one["st_info"]["type"] == "STT_FUNC"), None)
    if index is None:
        raise UnreadableError(f"there is no {kernel} in its code")
    function = struct.pack("<I", index)
    of_function = {
        number: int.from_bytes(value[4:], "little")
        for number, value in _attributes(cubin, sections[".nv.info"])
        if value.startswith(function)
    }
    of_block = dict(_attributes(cubin, sections[f".nv.info.{kernel}"]))
    if not {_REGISTERS, _STACK} <= of_function.keys():
        raise UnreadableError(f"the code of {kernel} doesn't say its registers and its stack")
    threads = next((of_block[number] for number in _THREADS if number in of_block), None)
    shared = sections.get(f".nv.shared.{kernel}")
    return Resources(
        registers=of_function[_REGISTERS],
        stack_bytes=of_function[_STACK],
        shared_bytes=_without_system(shared["sh_size"], _architecture(elf)) if shared else 0,
        threads=math.prod(struct.unpack("<3I", take(threads, 0, 12))) if threads is not None else None,
    )


def _attributes(cubin: bytes, section: Any) -> Iterator[tuple[int, bytes]]:
    data, at = take(cubin, section["sh_offset"], section["sh_size"]), 0
    while at < len(data):
        format_, number, *value = take(data, at, 4)
        at += 4
        if format_ not in _FORMATS:
            raise UnreadableError(f"an attribute of a kernel in format {format_}")
        size = int.from_bytes(value, "little") if format_ == _SIZED else 0
        yield number, take(data, at, size) if format_ == _SIZED else bytes(value)
        at += size


def _without_system(shared_bytes: int, architecture: int) -> int:
    own = shared_bytes - (_SYSTEM_SHARED_BYTES if architecture >= _HOPPER else 0)
    if own < 0:
        raise UnreadableError(f"{shared_bytes} bytes of shared memory for sm_{architecture}")
    return own


def _architecture(elf: Any) -> int:
    """Return the architecture, such as 90. The ABI's version says where it stands (EF_CUDA_SM in LLVM's ELF.h)."""
    version, flags = elf["e_ident"]["EI_ABIVERSION"], elf["e_flags"]
    if version not in (7, 8):
        raise UnreadableError(f"a kernel's code of ABI version {version}")
    return flags & 0xFF if version == 7 else flags >> 8 & 0xFF
