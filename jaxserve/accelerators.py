"""Which accelerators this machine has, and which of jaxserve's extras brings the jax that can use them.

It reads device files and asks `nvidia-smi`; it imports nothing that must be installed first, as `make install` runs it
to choose the extra: `python -m jaxserve.accelerators FILE` says what there is, and writes the choice into FILE where it
is another than before.
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

CPU = "cpu"
PLUGINS = {"cuda13": "jax_cuda13_plugin", "cuda12": "jax_cuda12_plugin", "tpu": "libtpu"}
"""The extras that bring jax a plug-in, and the module that is there when it is; of a platform the newest first."""

# What jax's installation guide asks of an NVIDIA driver and GPU.
_CUDA13_DRIVER, _CUDA13_CAPABILITY = 580, (7, 5)
_CUDA12_DRIVER, _CUDA12_CAPABILITY = 525, (5, 2)

_NVIDIA, _AMD, _GOOGLE = "0x10de", "0x1002", "0x1ae0"
_VGA, _3D, _DISPLAY, _PROCESSING = "0x0300", "0x0302", "0x0380", "0x1200"  # classes of PCI devices
# v2 and v3, v4, v5p, v5e, v6e, 7x, 8i, 8t. Of the same vendor are the network card and the disks of a Google VM.
_TPUS = ("0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x0083", "0x007c")

_WSL_SMI = "usr/lib/wsl/lib/nvidia-smi"
_SMI_TIMEOUT = 60.0
_AGAIN = "then run `make install` again"


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """The accelerators of one platform. `extra` is what brings the jax for them; it is None where no jax can use them
    as things are, and `problem` says why and what to do."""

    platform: Platform
    name: str
    extra: str | None = None
    problem: str = ""


def find(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> list[Accelerator]:
    """What this machine has. Below `root` are /dev, /proc and /sys; `nvidia-smi` is on the PATH of `environment`."""
    return [found for found in (_nvidia(root, environment), _tpu(root), _amd(root)) if found is not None]


def choose(found: Sequence[Accelerator], asked: str = "") -> str:
    """The extra to install: the one asked for, else what is found needs. Raises ValueError for one that isn't known."""
    if asked and asked not in (CPU, *PLUGINS):
        raise ValueError(f"ACCELERATOR={asked} is not known: choose {', '.join((CPU, *PLUGINS))}, or leave it out")
    return asked or next((accelerator.extra for accelerator in found if accelerator.extra is not None), CPU)


def report(found: Sequence[Accelerator], extra: str) -> str:
    """What there is and what is installed for it, in lines for a person."""
    lines = [f"found {one.name}{f': {one.problem}' if one.problem else ''}" for one in found]
    what = "jax for the CPU" if extra == CPU else f"jax with its plug-in {extra}"
    others = "|".join(name for name in (CPU, *PLUGINS) if name != extra)
    choice = f"installing {what} (to choose another: make install ACCELERATOR={others})"
    return "\n".join([*(lines or ["found no GPU and no TPU"]), choice])


def _nvidia(root: Path, environment: Mapping[str, str]) -> Accelerator | None:
    smi = _nvidia_smi(root, environment)
    files = _numbered(root, "dev", "nvidia")
    if not (smi.names or files or any(kind in (_VGA, _3D) for kind, _ in _on_bus(root, _NVIDIA))):
        return None
    driver = smi.driver or _loaded_driver(root)
    name = f"{_counted(smi.names or ['NVIDIA GPU'])}{f' with driver {driver}' if driver else ''}"
    extra, problem = None, ""
    if driver is None and not files:
        said = f" (nvidia-smi says: {smi.complaint})" if smi.complaint else ""
        problem = f"no NVIDIA driver is loaded{said}: install version {_CUDA13_DRIVER} or newer, {_AGAIN}"
    elif not (smi.names or files):
        problem = f"its device files (/dev/nvidia0) are missing: start a container with `--gpus all`, {_AGAIN}"
    elif sys.platform != "linux":
        problem = "jax can use it on Linux only (on Windows: in WSL2)"
    elif driver is not None and _major(driver) < _CUDA12_DRIVER:
        problem = (
            f"the driver is too old, CUDA 12 needs {_CUDA12_DRIVER}, CUDA 13 {_CUDA13_DRIVER}: update it, {_AGAIN}"
        )
    elif smi.capability is not None and smi.capability < _CUDA12_CAPABILITY:
        problem = "its compute capability is {}.{}, and jax needs 5.2".format(*smi.capability)
    else:
        # A driver whose version is not known is taken for an old one: CUDA 12 runs on new ones too.
        is_new = driver is not None and _major(driver) >= _CUDA13_DRIVER
        extra = "cuda13" if is_new and (smi.capability or _CUDA13_CAPABILITY) >= _CUDA13_CAPABILITY else "cuda12"
    return Accelerator("cuda", name, extra, problem)


def _tpu(root: Path) -> Accelerator | None:
    chips = sum(number in _TPUS for _, number in _on_bus(root, _GOOGLE))
    files = _numbered(root, "dev", "accel")
    if not (chips or files):
        return None
    name = _counted(["TPU chip"] * (chips or files))
    if files or _numbered(root, "dev/vfio", ""):
        return Accelerator("tpu", name, "tpu")
    problem = (
        f"its device files (/dev/accel0, /dev/vfio/0) are missing: start a container with `--privileged`, {_AGAIN}"
    )
    return Accelerator("tpu", name, problem=problem)


def _amd(root: Path) -> Accelerator | None:
    """AMD's cards for servers; a GPU that draws a laptop's screen is no news."""
    cards = sum(kind in (_DISPLAY, _PROCESSING) for kind, _ in _on_bus(root, _AMD))
    if not cards:
        return None
    return Accelerator("rocm", _counted(["AMD GPU"] * cards), problem="jaxserve does not serve AMD's GPUs")


@dataclasses.dataclass(frozen=True)
class _Smi:
    """What `nvidia-smi` says: the name of each GPU, the oldest's capability; where it fails, its last line."""

    names: Sequence[str] = ()
    driver: str | None = None
    capability: tuple[int, int] | None = None
    complaint: str = ""


def _nvidia_smi(root: Path, environment: Mapping[str, str]) -> _Smi:
    program = shutil.which("nvidia-smi", path=environment.get("PATH")) or str(root / _WSL_SMI)
    lines, complaint = _ask(program, "driver_version,name")
    rows = [[field.strip() for field in line.split(",", 1)] for line in lines]
    rows = [row for row in rows if re.fullmatch(r"\d+(\.\d+)*", row[0])]
    if not rows:
        return _Smi(complaint=complaint)
    # A question of its own, as old drivers don't know it.
    numbers = [line.split(".") for line in _ask(program, "compute_cap")[0] if re.fullmatch(r"\d{1,2}\.\d", line)]
    capability = min(((int(major), int(minor)) for major, minor in numbers), default=None)
    return _Smi([row[-1] if len(row) == 2 else "NVIDIA GPU" for row in rows], rows[0][0], capability)


def _ask(program: str, what: str) -> tuple[list[str], str]:
    """The lines of an answer, one for each GPU; where there is none, what the program says instead."""
    command = [program, f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SMI_TIMEOUT)
    except OSError:
        return [], ""
    except subprocess.TimeoutExpired:
        return [], f"nothing in {_SMI_TIMEOUT:.0f} s"
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return ([] if done.returncode else lines), (lines[-1] if lines else f"exit code {done.returncode}")


def _loaded_driver(root: Path) -> str | None:
    """Of a line such as `NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan …`."""
    version = re.search(r"^NVRM version:.*?\s(\d{3,}\.[\d.]+)\s", _read(root / "proc/driver/nvidia/version"))
    return version.group(1) if version else None


def _on_bus(root: Path, vendor: str) -> list[tuple[str, str]]:
    """Class and number of each PCI device of a vendor."""
    devices = (root / "sys/bus/pci/devices").glob("*.0")  # one of several functions of a device
    return [(_read(at / "class")[:6], _read(at / "device")) for at in devices if _read(at / "vendor") == vendor]


def _numbered(root: Path, folder: str, stem: str) -> int:
    """How many files of a folder are called so, with a number."""
    return sum(path.name.removeprefix(stem).isdecimal() for path in (root / folder).glob(f"{stem}*"))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _counted(names: Sequence[str]) -> str:
    counts = {name: names.count(name) for name in names}
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def _major(driver: str) -> int:
    return int(driver.partition(".")[0])


def main(file: Path) -> None:
    """Choose the extra: ACCELERATOR of the environment, or what is found."""
    found = find()
    try:
        extra = choose(found, os.environ.get("ACCELERATOR", ""))
    except ValueError as error:
        sys.exit(str(error))
    print(report(found, extra))
    if _read(file) != extra:
        file.write_text(f"{extra}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
