"""A step gives the same results when vocabulary, heads and MLP are split over devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.selection import grid

ROOT = Path(__file__).parents[3]


CHECKS = [["sampler", "collectives", "kv_scales", "empty_group"], ["step"]]


@pytest.mark.process
@pytest.mark.parametrize("checks", grid(CHECKS, CHECKS[0].__eq__), ids="-".join)
def test_on_shards(checks: list[str]) -> None:
    """Several in one process, as most of a short one's time goes to its start."""
    flags = "--xla_backend_optimization_level=0"  # small programs are compiled longer than they run
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.runtime.on_shards", *checks]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "as it should be\n"
