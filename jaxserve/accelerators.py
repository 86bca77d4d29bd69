"""Detects this machine's accelerators, and chooses the jaxserve extra that installs the jax for them.

It reads device files and runs `nvidia-smi`. It imports only the standard library, because `make install` runs it to
choose the extra: `python -m jaxserve.accelerators FILE` prints what it found, and writes the choice into FILE if it has
changed.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

Platform = Literal["cuda", "tpu", "rocm"]

CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"
TPU_CHIPS = "TPU_VISIBLE_CHIPS"
TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""The value of TPU_CHIPS_PER_PROCESS_BOUNDS for each number of chips that a process can have."""

CPU = "cpu"
PLUGINS = {"cuda13": "jax_cuda13_plugin", "cuda12": "jax_cuda12_plugin", "tpu": "libtpu"}
"""The extras that install a jax plug-in, and the module by which it is recognized; the newest of a platform first."""

# The minimal NVIDIA driver version and compute capability, from jax's installation guide.
_CUDA13_DRIVER, _CUDA13_CAPABILITY = 580, (7, 5)
_CUDA12_DRIVER, _CUDA12_CAPABILITY = 525, (5, 2)

_NVIDIA, _AMD, _GOOGLE = "0x10de", "0x1002", "0x1ae0"
_VGA, _3D, _DISPLAY, _PROCESSING = "0x0300", "0x0302", "0x0380", "0x1200"  # classes of PCI devices
# PCI device numbers of v2 and v3, v4, v5p, v5e, v6e, 7x, 8i, 8t. The network card and disks of a Google VM have the
# same vendor number.
_TPUS = ("0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x0083", "0x007c")

_WSL_SMI = "usr/lib/wsl/lib/nvidia-smi"
_SMI_TIMEOUT = 60.0
_REINSTALL = "then run `make install` again"


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """The accelerators of one platform. `extra` installs the jax for them.

    If no jax can use them at present, `extra` is None, and `problem` describes the reason and what to do.
    """

    platform: Platform
    name: str
    extra: str | None = None
    problem: str = ""


def find_accelerators(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> list[Accelerator]:
    """Return the accelerators of this machine. `root` contains /dev, /proc and /sys; `environment` has the PATH."""
    return [found for found in (_nvidia(root, environment), _tpu(root), _amd(root)) if found is not None]


def visible_devices(variable: str, environment: Mapping[str, str]) -> list[str]:
    """Return the names that `CUDA_DEVICES` or `TPU_CHIPS` lists, [] if it isn't set."""
    return [name.strip() for name in environment.get(variable, "").split(",") if name.strip()]


def tpu_environment(chips: Sequence[str]) -> dict[str, str]:
    """Return the environment of a process that uses these chips of its host; `TPU_BOUNDS` has the possible counts."""
    return {
        TPU_CHIPS: ",".join(chips),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": TPU_BOUNDS[len(chips)],
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }


def nvidia_memory_bytes(kind: str, root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the memory of this machine's GPUs named `kind`, the smallest of them; None if nvidia-smi names none."""
    rows = (line.rpartition(",") for line in _query_smi(_smi_program(root, environment), "name,memory.total")[0])
    # A line is such as `NVIDIA H200, 143771 MiB`.
    sizes = [re.fullmatch(r"(\d+) MiB", size.strip()) for name, _, size in rows if name.strip() == kind]
    return min((int(size.group(1)) * 2**20 for size in sizes if size is not None), default=None)


def choose_extra(found: Sequence[Accelerator], asked: str = "") -> str:
    """Return the extra to install: `asked`, else the one that `found` needs. Raise ValueError for an unknown one."""
    if asked and asked not in (CPU, *PLUGINS):
        raise ValueError(f"ACCELERATOR={asked} is not known: choose {', '.join((CPU, *PLUGINS))}, or leave it out")
    return asked or next((accelerator.extra for accelerator in found if accelerator.extra is not None), CPU)


def report(found: Sequence[Accelerator], extra: str) -> str:
    """Return a text that lists the accelerators found and the extra to install."""
    lines = [f"found {one.name}{f': {one.problem}' if one.problem else ''}" for one in found]
    what = "jax for the CPU" if extra == CPU else f"jax with its plug-in {extra}"
    others = "|".join(name for name in (CPU, *PLUGINS) if name != extra)
    choice = f"installing {what} (to choose another: make install ACCELERATOR={others})"
    return "\n".join([*(lines or ["found no GPU and no TPU"]), choice])


def _nvidia(root: Path, environment: Mapping[str, str]) -> Accelerator | None:
    smi = _nvidia_smi(root, environment)
    files = _count_numbered_files(root, "dev", "nvidia")
    if not (smi.names or files or any(kind in (_VGA, _3D) for kind, _ in _pci_devices(root, _NVIDIA))):
        return None
    driver = smi.driver or _loaded_driver(root)
    name = f"{_count_names(smi.names or ['NVIDIA GPU'])}{f' with driver {driver}' if driver else ''}"
    extra, problem = None, ""
    if driver is None and not files:
        said = f" (nvidia-smi says: {smi.error})" if smi.error else ""
        problem = f"no NVIDIA driver is loaded{said}: install version {_CUDA13_DRIVER} or newer, {_REINSTALL}"
    elif not (smi.names or files):
        problem = f"its device files (/dev/nvidia0) are missing: start a container with `--gpus all`, {_REINSTALL}"
    elif sys.platform != "linux":
        problem = "jax can use it on Linux only (on Windows: in WSL2)"
    elif driver is not None and _major(driver) < _CUDA12_DRIVER:
        problem = (
            f"the driver is too old, CUDA 12 needs {_CUDA12_DRIVER}, CUDA 13 {_CUDA13_DRIVER}: update it, {_REINSTALL}"
        )
    elif smi.capability is not None and smi.capability < _CUDA12_CAPABILITY:
        problem = "its compute capability is {}.{}, and jax needs 5.2".format(*smi.capability)
    else:
        # If the driver's version is unknown, assume an old one: CUDA 12 runs on new drivers too.
        is_new = driver is not None and _major(driver) >= _CUDA13_DRIVER
        extra = "cuda13" if is_new and (smi.capability or _CUDA13_CAPABILITY) >= _CUDA13_CAPABILITY else "cuda12"
    return Accelerator("cuda", name, extra, problem)


def _tpu(root: Path) -> Accelerator | None:
    chips = sum(number in _TPUS for _, number in _pci_devices(root, _GOOGLE))
    files = _count_numbered_files(root, "dev", "accel")
    if not (chips or files):
        return None
    name = _count_names(["TPU chip"] * (chips or files))
    if files or _count_numbered_files(root, "dev/vfio", ""):
        return Accelerator("tpu", name, "tpu")
    problem = (
        f"its device files (/dev/accel0, /dev/vfio/0) are missing: start a container with `--privileged`, {_REINSTALL}"
    )
    return Accelerator("tpu", name, problem=problem)


def _amd(root: Path) -> Accelerator | None:
    """Find AMD's server GPUs; the integrated GPU of a laptop is ignored."""
    cards = sum(kind in (_DISPLAY, _PROCESSING) for kind, _ in _pci_devices(root, _AMD))
    if not cards:
        return None
    return Accelerator("rocm", _count_names(["AMD GPU"] * cards), problem="jaxserve does not serve AMD's GPUs")


@dataclasses.dataclass(frozen=True)
class _SmiReport:
    """The output of `nvidia-smi`: the GPUs' names, and the lowest compute capability; if it fails, its last line."""

    names: Sequence[str] = ()
    driver: str | None = None
    capability: tuple[int, int] | None = None
    error: str = ""


def _nvidia_smi(root: Path, environment: Mapping[str, str]) -> _SmiReport:
    program = _smi_program(root, environment)
    lines, error = _query_smi(program, "driver_version,name")
    rows = [[field.strip() for field in line.split(",", 1)] for line in lines]
    rows = [row for row in rows if re.fullmatch(r"\d+(\.\d+)*", row[0])]
    if not rows:
        return _SmiReport(error=error)
    # This is a separate query, because old drivers don't support it.
    numbers = [line.split(".") for line in _query_smi(program, "compute_cap")[0] if re.fullmatch(r"\d{1,2}\.\d", line)]
    capability = min(((int(major), int(minor)) for major, minor in numbers), default=None)
    return _SmiReport([row[-1] if len(row) == 2 else "NVIDIA GPU" for row in rows], rows[0][0], capability)


def _smi_program(root: Path, environment: Mapping[str, str]) -> str:
    return shutil.which("nvidia-smi", path=environment.get("PATH")) or str(root / _WSL_SMI)


def _query_smi(program: str, fields: str) -> tuple[list[str], str]:
    """Return one line per GPU, and the last line that the program printed, for an error message."""
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SMI_TIMEOUT)
    except OSError:
        return [], ""
    except subprocess.TimeoutExpired:
        return [], f"no output after {_SMI_TIMEOUT:.0f} s"
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return ([] if done.returncode else lines), (lines[-1] if lines else f"exit code {done.returncode}")


def _loaded_driver(root: Path) -> str | None:
    """Read the version from a line such as `NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan …`."""
    version = re.search(r"^NVRM version:.*?\s(\d{3,}\.[\d.]+)\s", _read(root / "proc/driver/nvidia/version"))
    return version.group(1) if version else None


def _pci_devices(root: Path, vendor: str) -> list[tuple[str, str]]:
    """Return the class and device number of each PCI device of a vendor."""
    devices = (root / "sys/bus/pci/devices").glob("*.0")  # only the first function of each device
    return [(_read(at / "class")[:6], _read(at / "device")) for at in devices if _read(at / "vendor") == vendor]


def _count_numbered_files(root: Path, folder: str, stem: str) -> int:
    """Count the files in a folder whose name is `stem` and a number."""
    return sum(path.name.removeprefix(stem).isdecimal() for path in (root / folder).glob(f"{stem}*"))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _count_names(names: Sequence[str]) -> str:
    counts = {name: names.count(name) for name in names}
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def _major(driver: str) -> int:
    return int(driver.partition(".")[0])


def main(file: Path) -> None:
    """Choose the extra from the ACCELERATOR variable or the accelerators found; print it and write it to `file`."""
    found = find_accelerators()
    try:
        extra = choose_extra(found, os.environ.get("ACCELERATOR", ""))
    except ValueError as error:
        sys.exit(str(error))
    print(report(found, extra))
    if _read(file) != extra:
        file.write_text(f"{extra}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
