"""Reads machine code of kernels for several GPUs, built by hand in the form that `ptxas` writes."""

from __future__ import annotations

import struct

import pytest

from pallas_kernels.gpu_code.cubin import Resources, resources
from pallas_kernels.gpu_code.wire import UnreadableError

REGISTERS, STACK, FRAME, REQUIRED_THREADS, MOST_THREADS = 0x2F, 0x12, 0x11, 0x10, 0x05
ALL = {REGISTERS: 40, STACK: 16}


def attribute(number: int, *values: int) -> bytes:
    return struct.pack(f"<BBH{len(values)}I", 4, number, 4 * len(values), *values)


def cubin(
    *,
    architecture: int = 90,
    abi: int = 8,
    machine: int = 190,
    of_kernel: dict[int, int] = ALL,
    of_block: bytes = b"",
    shared: int | None = None,
) -> bytes:
    """Return the code of a kernel `mine`, which is symbol 2; symbol 1 is a function that it calls."""
    strings = b"\0helper\0mine\0"
    symbols = b"".join(struct.pack("<IBBHQQ", name, kind, 0, 0, 0, 0) for name, kind in ((0, 0), (1, 0x22), (8, 0x12)))
    info = attribute(REGISTERS, 1, 99) + attribute(STACK, 1, 99)
    info += b"".join(attribute(number, 2, value) for number, value in of_kernel.items())
    sections = {"": b"", ".strtab": strings, ".symtab": symbols, ".nv.info": info, ".nv.info.mine": of_block}
    names = b"\0".join(name.encode() for name in (*sections, ".nv.shared.mine", ".shstrtab")) + b"\0"
    data, headers = b"", []
    for name, content in {**sections, ".shstrtab": names}.items():
        at = names.index(b"\0" + name.encode() + b"\0") + 1 if name else 0
        kind = {"": 0, ".strtab": 3, ".symtab": 2, ".shstrtab": 3}.get(name, 1)
        link, entry = (1 + (shared is not None), 24) if kind == 2 else (0, 0)
        headers.append(struct.pack("<IIQQQQIIQQ", at, kind, 0, 0, 64 + len(data), len(content), link, 0, 0, entry))
        data += content
    if shared is not None:
        at = names.index(b".nv.shared.mine")
        headers.insert(1, struct.pack("<IIQQQQIIQQ", at, 8, 0, 0, 10**9, shared, 0, 0, 0, 0))
    identification = b"\x7fELF\x02\x01\x01" + bytes([65 if abi == 8 else 51, abi])
    flags = architecture << 8 | 2 if abi == 8 else architecture << 16 | architecture
    count = len(headers)
    header = struct.pack("<16sHHIQQQIHHHHHH", identification, 2, machine, 1, 0, 0, 64 + len(data), flags, 64, 0, 0, 64,
                         count, count - 1)  # fmt: skip
    return header + data + b"".join(headers)


def test_resources_are_those_of_the_kernel_not_of_a_function_it_calls() -> None:
    threads = attribute(REQUIRED_THREADS, 32, 4, 1)
    assert resources(cubin(of_block=threads), "mine") == Resources(40, 16, 0, 128)


def test_attributes_of_other_formats_are_skipped() -> None:
    others = b"\x02\x4c\x01\x00" + b"\x01\x35\x00\x00" + b"\x03\x1b\xff\x00" + attribute(0x17, 1, 2, 3)
    assert resources(cubin(of_block=others + attribute(MOST_THREADS, 256, 1, 1)), "mine").threads == 256
    assert resources(cubin(of_block=others), "mine").threads is None


@pytest.mark.parametrize(
    ("architecture", "abi", "section", "own"),
    [(80, 8, 4096, 4096), (89, 7, 64, 64), (90, 8, 1088, 64), (90, 7, 1088, 64), (100, 8, 1024, 0), (80, 8, None, 0)],
)
def test_shared_memory_excludes_that_of_the_system(architecture: int, abi: int, section: int | None, own: int) -> None:
    assert resources(cubin(architecture=architecture, abi=abi, shared=section), "mine").shared_bytes == own


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (b"\x7fELF" + b"\0" * 100, "can't be read: ELFError"),
        (cubin(machine=62), "isn't NVIDIA's"),
        (cubin(of_kernel={REGISTERS: 40, FRAME: 0}), "the code of mine doesn't say its registers and its stack"),
        (cubin(of_kernel={STACK: 0}), "the code of mine doesn't say its registers and its stack"),
        (cubin(of_block=b"\x09\x00\x00\x00"), "an attribute of a kernel in format 9"),
        (cubin(of_block=attribute(REQUIRED_THREADS, 32)), "it ends at byte"),
        (cubin(shared=512), "512 bytes of shared memory for sm_90"),
        (cubin(abi=9, shared=2048), "ABI version 9"),
    ],
)
def test_unknown_code_is_refused(code: bytes, why: str) -> None:
    with pytest.raises(UnreadableError, match=why):
        resources(code, "mine")


def test_a_missing_kernel_is_refused() -> None:
    with pytest.raises(UnreadableError, match="there is no helpe in its code"):
        resources(cubin(), "helpe")


def test_truncated_code_is_refused() -> None:
    whole = cubin(of_block=attribute(REQUIRED_THREADS, 32, 4, 1), shared=2048)
    for end in range(len(whole)):
        with pytest.raises(UnreadableError):
            resources(whole[:end], "mine")
