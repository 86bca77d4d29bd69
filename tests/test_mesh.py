"""The keystone on meshes: whatever the numbers of ranks and shards, the tokens are those of one device.

Eight CPU devices are simulated in a process of their own, as jax makes up its mind about them once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SHAPES = [f"{data}x{tensor}" for data in (1, 2, 4) for tensor in (1, 2, 4) if data * tensor <= 8]
# Programs this small are compiled longer than they run.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"


@pytest.fixture(scope="module")
def served() -> dict[str, Any]:
    """What each shape gave; without those that failed, and all that came after."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    command = [sys.executable, "-m", "tests.keystone_on_meshes", *SHAPES]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["shape"]: line for line in lines} | {"log": done.stderr}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_one_device(shape: str, served: dict[str, Any]) -> None:
    assert shape in served, served["log"][-5000:]
    found = served[shape]
    assert found["tokens"] == served["1x1"]["tokens"]
    assert min(found["aborted"], found["hits"], found["loaded"]) > 0, "these seeds try too little"
    assert found["preempted"] > 0
    assert found["compiles"] == 0 or shape == "1x1", "the naive recompute compiles once"
