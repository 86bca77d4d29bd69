"""Fake machines: the files and programs by which accelerators are detected."""

from __future__ import annotations

from pathlib import Path

VERSION = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Jan 16 17:46:19 UTC 2025
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""


def write_nvidia_smi(
    folder: Path, *answers: str, gpus: int = 1, memory: str = "24576 MiB", complaint: str = "No devices were found"
) -> None:
    """Write a fake `nvidia-smi`. `answers` are driver, name and compute capability; without the last it is a version
    that can't tell the capability, and without any answer it fails with `complaint`."""
    folder.mkdir(parents=True, exist_ok=True)
    driver, name, capability = (*answers, "", "", "")[:3]
    known = {
        "driver_version,name": f"{driver}, {name}" if driver else "",
        "compute_cap": capability,
        "name,memory.total": f"{name}, {memory}" if name else "",
    }
    cases = "".join(
        f"--query-gpu={question}) {f'echo "{answer}"; ' * gpus}exit 0;;\n"
        for question, answer in known.items()
        if answer
    )
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}esac\necho "{complaint}"\nexit 6\n')
    program.chmod(0o755)


def write_device(root: Path, slot: int, vendor: str, number: str, kind: str) -> None:
    """Write the files of a device on the PCI bus."""
    folder = root / f"sys/bus/pci/devices/0000:00:{slot:02x}.0"
    folder.mkdir(parents=True)
    for name, value in (("vendor", vendor), ("device", number), ("class", kind)):
        (folder / name).write_text(f"{value}\n")


def write_file(root: Path, name: str, text: str = "") -> None:
    """Write a device file, or a file of /proc."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
