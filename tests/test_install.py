"""`make install` on machines with and without accelerators, whose `nvidia-smi` and environment are made up.

The real Makefile and the real look at the machine; what stands for `.venv/bin/python` runs neither pip nor venv.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.accelerators import find_accelerators
from tests.machines import write_nvidia_smi

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("make") is None, reason="there is no make"),
    pytest.mark.skipif(bool(find_accelerators()), reason="this machine has an accelerator of its own"),
]


class Checkout:
    """A copy of what `make install` needs; `pip` are the commands that it would have run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        for name in (
            "Makefile",
            "pyproject.toml",
            "scripts/make-venv",
            "jaxserve/__init__.py",
            "jaxserve/accelerators.py",
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        python = folder / ".venv/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(
            f'#!/bin/sh\nif [ "$2" = pip ]; then echo "$@" >> {folder}/pip; else exec {sys.executable} "$@"; fi\n'
        )
        python.chmod(0o755)

    def make(self, *arguments: str, accelerator: str | None = None, fails: bool = False) -> tuple[str, list[str]]:
        """What it says, and what was installed and removed meanwhile."""
        of_make = ("ACCELERATOR", "MAKEFLAGS", "MAKELEVEL")
        environment = {key: value for key, value in os.environ.items() if key not in of_make}
        environment["PATH"] = f"{self.bin}{os.pathsep}{environment['PATH']}"
        if accelerator is not None:
            environment["ACCELERATOR"] = accelerator
        (self.folder / "pip").write_text("")
        done = subprocess.run(
            ["make", *arguments], cwd=self.folder, env=environment, capture_output=True, text=True, check=not fails
        )
        calls = [line.split("-q ")[-1].split("-y ")[-1] for line in (self.folder / "pip").read_text().splitlines()]
        return done.stdout + done.stderr, calls


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    checkout = Checkout(tmp_path)
    write_nvidia_smi(checkout.bin)
    return checkout


CUDA12, CUDA13 = "jax-cuda12-plugin jax-cuda12-pjrt", "jax-cuda13-plugin jax-cuda13-pjrt"


def test_the_jax_is_that_for_the_machine_and_changes_with_it(checkout: Checkout) -> None:
    said, pip = checkout.make("install")
    assert "found no GPU and no TPU\ninstalling jax for the CPU" in said
    assert pip == [f"{CUDA12} {CUDA13} libtpu", "-e .[cpu]"]
    assert checkout.make("install")[1] == []

    write_nvidia_smi(checkout.bin, "570.86.15", "NVIDIA L4", "8.9")
    assert checkout.make(".venv/.installed") == ("make: '.venv/.installed' is up to date.\n", [])  # as `make run` asks
    said, pip = checkout.make("install")
    assert "found NVIDIA L4 with driver 570.86.15\ninstalling jax with its plug-in cuda12" in said
    assert pip == [f"{CUDA13} libtpu", "-e .[cuda12]"]

    write_nvidia_smi(checkout.bin, "580.65.06", "NVIDIA L4", "8.9")
    assert checkout.make("install")[1] == [f"{CUDA12} libtpu", "-e .[cuda13]"]
    assert checkout.make("install")[1] == []


def test_a_choice_goes_over_what_is_found_and_stays(checkout: Checkout) -> None:
    write_nvidia_smi(checkout.bin, "580.65.06", "NVIDIA L4", "8.9")
    said, pip = checkout.make("install", accelerator="cpu")
    assert "found NVIDIA L4 with driver 580.65.06\ninstalling jax for the CPU" in said
    assert pip[1] == "-e .[cpu]"
    assert checkout.make(".venv/.installed")[1] == []
    assert checkout.make("install", "ACCELERATOR=tpu")[1] == [f"{CUDA12} {CUDA13}", "-e .[tpu]"]
    said, pip = checkout.make("install", accelerator="gpu", fails=True)
    assert "ACCELERATOR=gpu is not known: choose cpu, cuda13, cuda12, tpu" in said
    assert pip == []


def test_the_first_run_looks_too(checkout: Checkout) -> None:
    write_nvidia_smi(checkout.bin, "580.65.06", "NVIDIA L4", "8.9")
    said, pip = checkout.make(".venv/.installed")
    assert "found NVIDIA L4" in said
    assert pip[1] == "-e .[cuda13]"
