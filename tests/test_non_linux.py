"""Tests imports, `plan`, a generation and a server on a system that isn't Linux, which `non_linux/sitecustomize.py`
imitates. `tests/pallas_kernels/cpu` compiles the CPU's kernels for other CPUs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from jaxserve import host
from tests.cli.model_folder import write_config
from tests.tiny_model import tiny_settings

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT / 'tests/non_linux'}{os.pathsep}{ROOT}"}


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], env=ENVIRONMENT, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_imitated_system_is_not_linux() -> None:
    code = "import sys, os, pathlib; print(sys.platform, pathlib.Path('/proc/cpuinfo').read_text())"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith("FileNotFoundError")


def test_every_module_can_be_imported() -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in ("jaxserve", "pallas_kernels")
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.stem not in ("__main__", "__init__")
    ]
    run("-c", "\n".join(f"import {name}" for name in names))


def test_plan(tmp_path: Path) -> None:
    said = run("-m", "jaxserve", "plan", write_config(tmp_path / "config.json"), "--target", "nvidia-h200")
    assert "weights" in said


def flags(folders: pytest.TempPathFactory) -> list[str]:
    return [
        f"--{name.replace('_', '-')}={value[0] if isinstance(value, list) else value}"
        for name, value in tiny_settings(folders).items()
    ]


@contextlib.contextmanager
def server(flags: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    port = host.free_port()
    command = [sys.executable, "-m", "jaxserve", "serve", f"--port={port}", *flags]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "Ready" in line:
                break
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.grid
def test_a_generation_and_a_server(tmp_path_factory: pytest.TempPathFactory) -> None:
    common = flags(tmp_path_factory)
    text = run("-m", "jaxserve", "generate", "hi", "--max-tokens=8", *common)
    with server(common) as (process, url):
        body = {"model": httpx.get(f"{url}/v1/models").json()["data"][0]["id"], "prompt": "hi", "max_tokens": 8}
        answer = httpx.post(f"{url}/v1/completions", json={**body, "temperature": 0}, timeout=60).json()
        assert f"{answer['choices'][0]['text']}\n" == text
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
