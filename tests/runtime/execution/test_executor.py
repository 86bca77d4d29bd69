"""Runs of all programs without requests, which an accelerator makes before it is ready, change nothing."""

from __future__ import annotations

from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from jaxserve.runtime.execution.device_commands import LocalCommands
from jaxserve.runtime.execution.executor import DeviceExecutor
from jaxserve.runtime.execution.host_pool import HostPool
from jaxserve.runtime.programs.builder import READ_KEY, UPDATE_KEY, WRITE_KEY, step_keys
from jaxserve.runtime.programs.program_set import ProgramKey
from jaxserve.runtime.step.page_copies import row_specs
from tests.runtime import tiny
from tests.runtime.tiny import builder, mesh, params, specs, zero_state

pytestmark = pytest.mark.slow

CAPACITY = msgspec.structs.replace(tiny.CAPACITY, decode_buckets=(4,), token_buckets=(16,))
KEYS: list[ProgramKey] = [UPDATE_KEY, READ_KEY, WRITE_KEY, *step_keys(CAPACITY)]


def _random_state() -> Any:
    """Return a state that is nowhere zero, as if requests were in the middle of their work."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda a: jax.device_put(rng.integers(1, 3, a.shape).astype(a.dtype), a.sharding), zero_state(CAPACITY)
    )


def test_a_run_without_requests_changes_nothing() -> None:
    runs: list[ProgramKey] = []

    def counted(key: ProgramKey) -> Any:
        program = builder(CAPACITY).compile(key)

        def run(*arguments: Any) -> Any:
            runs.append(key)
            return program(*arguments)

        return run

    before = jax.tree.map(np.asarray, _random_state())
    host = HostPool(row_specs(specs(CAPACITY)), 4, mesh())
    commands = LocalCommands(params(), _random_state(), {key: counted(key) for key in KEYS}, host, mesh())
    executor = DeviceExecutor(commands, CAPACITY)
    compiled = executor.compiles_after_ready
    executor.warm_up(KEYS)
    assert runs == [*KEYS, *KEYS], "a program with collectives builds its CUDA graph in the second run"
    assert executor.compiles_after_ready == compiled
    for ours, theirs in zip(jax.tree.leaves(commands._state), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs)
