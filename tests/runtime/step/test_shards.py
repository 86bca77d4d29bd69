"""A step gives the same results when vocabulary, heads and MLP are split over devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.selection import grid

ROOT = Path(__file__).parents[3]


CHECKS = grid(["step", "sampler", "collectives", "kv_scales", "empty_group"], lambda check: check != "step")


@pytest.mark.process
@pytest.mark.parametrize("check", CHECKS)
def test_on_shards(check: str) -> None:
    flags = "--xla_backend_optimization_level=0"  # small programs are compiled longer than they run
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.runtime.on_shards", check]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "as it should be\n"
