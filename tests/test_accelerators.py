"""The accelerators detected on fake machines, and the extra chosen for them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jaxserve.accelerators import Accelerator, choose_extra, find_accelerators, nvidia_memory_bytes, report
from tests.machines import VERSION, write_device, write_file, write_nvidia_smi

L4 = ("NVIDIA L4", "8.9")
GPU_ON_BUS = ("0x10de", "0x27b8", "0x030200")
TPU_ON_BUS = ("0x1ae0", "0x0063", "0x120000")
NETWORK_CARD, DISK = ("0x1ae0", "0x0042", "0x020000"), ("0x1ae0", "0x001f", "0x010802")


@pytest.fixture(autouse=True)
def _linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")


def look(root: Path) -> list[Accelerator]:
    return find_accelerators(root, {"PATH": str(root / "bin")})


def only(root: Path) -> Accelerator:
    [found] = look(root)
    assert (found.extra is None) == bool(found.problem)
    return found


def test_a_machine_without_accelerators(tmp_path: Path) -> None:
    write_device(tmp_path, 1, *NETWORK_CARD)
    write_device(tmp_path, 2, *DISK)
    write_device(tmp_path, 3, "0x1002", "0x164e", "0x030000")  # a laptop's integrated GPU
    write_file(tmp_path, "dev/nvidiactl")
    write_file(tmp_path, "dev/vfio/0")
    write_file(tmp_path, "dev/vfio/vfio")
    assert look(tmp_path) == []
    write_nvidia_smi(tmp_path / "bin")
    assert look(tmp_path) == []
    assert report([], "cpu").startswith("found no GPU and no TPU\ninstalling jax for the CPU")


@pytest.mark.parametrize(
    ("answers", "extra"),
    [
        (("580.65", *L4), "cuda13"),
        (("580.65.06", *L4), "cuda13"),
        (("595.10", "NVIDIA B200", "10.0"), "cuda13"),
        (("580.65.06", "NVIDIA L4"), "cuda13"),
        (("580.65.06", "Tesla T4", "7.5"), "cuda13"),
        (("580.65.06", "Tesla V100-SXM2-16GB", "7.0"), "cuda12"),
        (("570.1", *L4), "cuda12"),
        (("525.60.13", *L4), "cuda12"),
    ],
)
def test_the_cuda_version_depends_on_driver_and_gpu(tmp_path: Path, answers: tuple[str, ...], extra: str) -> None:
    write_nvidia_smi(tmp_path / "bin", *answers)
    assert only(tmp_path) == Accelerator("cuda", f"{answers[1]} with driver {answers[0]}", extra)
    assert choose_extra(look(tmp_path)) == extra


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        (("470.256.02", "Tesla T4"), "the driver is too old, CUDA 12 needs 525, CUDA 13 580: update it"),
        (("580.65.06", "Tesla M40", "5.0"), "its compute capability is 5.0, and jax needs 5.2"),
    ],
)
def test_too_old_gpus_get_the_cpu_extra_and_a_message(tmp_path: Path, answers: tuple[str, ...], problem: str) -> None:
    write_nvidia_smi(tmp_path / "bin", *answers)
    found = only(tmp_path)
    assert found.problem.startswith(problem)
    assert choose_extra([found]) == "cpu"
    assert f"found {answers[1]} with driver {answers[0]}: {problem}" in report([found], "cpu")


def test_several_gpus(tmp_path: Path) -> None:
    write_nvidia_smi(tmp_path / "bin", "580.65.06", *L4, gpus=4)
    assert only(tmp_path).name == "4 x NVIDIA L4 with driver 580.65.06"


def test_a_gpu_without_a_driver(tmp_path: Path) -> None:
    write_device(tmp_path, 4, *GPU_ON_BUS)
    assert only(tmp_path).problem.startswith("no NVIDIA driver is loaded: install version 580 or newer")
    write_nvidia_smi(tmp_path / "bin", complaint="NVIDIA-SMI has failed because it no driver.")
    assert "loaded (nvidia-smi says: NVIDIA-SMI has failed because" in only(tmp_path).problem


def test_a_gpu_without_device_files(tmp_path: Path) -> None:
    write_device(tmp_path, 4, *GPU_ON_BUS)
    write_file(tmp_path, "proc/driver/nvidia/version", VERSION.format("570.86.15"))
    found = only(tmp_path)
    assert found.name == "NVIDIA GPU with driver 570.86.15"
    assert found.problem.startswith("its device files (/dev/nvidia0) are missing: start a container with `--gpus all`")
    write_file(tmp_path, "dev/nvidia0")
    assert only(tmp_path).extra == "cuda12"


def test_a_driver_of_unknown_version_is_treated_as_old(tmp_path: Path) -> None:
    write_file(tmp_path, "dev/nvidia0")
    write_file(tmp_path, "dev/nvidia1")
    assert only(tmp_path) == Accelerator("cuda", "NVIDIA GPU", "cuda12")


def test_wsl(tmp_path: Path) -> None:
    write_file(tmp_path, "dev/dxg")
    write_nvidia_smi(tmp_path / "usr/lib/wsl/lib", "581.15", "NVIDIA GeForce RTX 4090", "8.9")
    assert only(tmp_path).extra == "cuda13"


def test_the_memory_of_a_gpu(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path / "bin")}
    assert nvidia_memory_bytes("NVIDIA L4", tmp_path, environment) is None
    write_nvidia_smi(tmp_path / "bin", "580.65.06", *L4, gpus=2, memory="23034 MiB")
    assert nvidia_memory_bytes("NVIDIA L4", tmp_path, environment) == 23034 * 2**20
    assert nvidia_memory_bytes("NVIDIA H200", tmp_path, environment) is None
    write_nvidia_smi(tmp_path / "bin", "580.65.06", *L4, memory="[N/A]")
    assert nvidia_memory_bytes("NVIDIA L4", tmp_path, environment) is None


def test_a_gpu_on_a_system_without_a_jax_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr("shutil.which", lambda name, path: str(tmp_path / "bin" / name))
    write_nvidia_smi(tmp_path / "bin", "581.15", *L4)
    assert only(tmp_path).problem == "jax can use it on Linux only (on Windows: in WSL2)"


def test_tpus(tmp_path: Path) -> None:
    for slot in range(4):
        write_device(tmp_path, slot, *TPU_ON_BUS)
    write_device(tmp_path, 9, *NETWORK_CARD)
    assert only(tmp_path).problem.startswith("its device files (/dev/accel0, /dev/vfio/0) are missing")
    write_file(tmp_path, "dev/vfio/0")
    assert only(tmp_path) == Accelerator("tpu", "4 x TPU chip", "tpu")


def test_a_tpu_with_only_a_device_file(tmp_path: Path) -> None:
    write_file(tmp_path, "dev/accel0")
    assert only(tmp_path) == Accelerator("tpu", "TPU chip", "tpu")


def test_amd_gpus_are_reported_but_not_served(tmp_path: Path) -> None:
    write_device(tmp_path, 1, "0x1002", "0x74a1", "0x120000")
    write_device(tmp_path, 2, "0x1002", "0x74a1", "0x120000")
    assert only(tmp_path) == Accelerator("rocm", "2 x AMD GPU", problem="jaxserve does not serve AMD's GPUs")
    assert choose_extra(look(tmp_path)) == "cpu"


def test_an_unknown_extra_is_an_error() -> None:
    assert choose_extra([Accelerator("cuda", "L4", "cuda13")], "cpu") == "cpu"
    with pytest.raises(ValueError, match="ACCELERATOR=rocm is not known: choose cpu, cuda13, cuda12, tpu, or leave"):
        choose_extra([], "rocm")
