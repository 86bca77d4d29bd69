"""The keystone on several processes: the tokens are those of one device, whatever is spread over whom."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.keystone_on_meshes import write_model
from tests.test_mesh import ROOT

pytestmark = pytest.mark.slow

# data x tensor, processes: a rank over both, a whole rank for each, each shard of each rank by itself.
CASES = [("1x2", 2), ("2x2", 2), ("2x2", 4)]


def _run(model: Path, shape: str, nnodes: int) -> dict[str, Any]:
    data, tensor = map(int, shape.split("x"))
    flags = f"--xla_force_host_platform_device_count={data * tensor // nnodes} --xla_backend_optimization_level=0"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.keystone_on_processes", str(model), shape, str(nnodes)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), address], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(nnodes)
    ]
    try:
        answers = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * nnodes, [log[-3000:] for _, log in answers]
    found: dict[str, Any] = json.loads(answers[0][0].splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, Any]:
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-m", "tests.keystone_on_meshes", "1x1"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("shape", "nnodes"), CASES, ids=[f"{shape} on {nnodes}" for shape, nnodes in CASES])
def test_tokens_are_those_of_one_device(shape: str, nnodes: int, model: Path, alone: dict[str, Any]) -> None:
    found = _run(model, shape, nnodes)
    assert found["tokens"] == alone["tokens"]
    assert min(found["aborted"], found["hits"], found["loaded"], found["preempted"]) > 0, "these seeds try too little"
