"""What the CPU's backend refuses, and that it copies no states."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Backend
from pallas_kernels.gated_delta import BACKENDS, DeltaProblem, DeltaRows, DeltaStates, choose_backend, gated_delta
from pallas_kernels.target import CPU
from tests.pallas_kernels.gated_delta.cases import Case, make_batch

PROBLEM = DeltaProblem(16, 32, 128, 128, 4, np.dtype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": np.dtype(np.float16)}, "float32 and bfloat16, not float16"),
        ({"key_dim": 72}, "keys of 16 to 256 in steps of 16, not of 72"),
        ({"value_dim": 512}, "values of 16 to 256 in steps of 16, not of 512"),
        ({"taps": 3}, "convolutions of 2, 4, 8 taps, not of 3"),
    ],
)
def test_what_is_not_supported_is_refused(change: dict[str, Any], reason: str) -> None:
    assert choose_backend(CPU, PROBLEM).name == "cpu"
    assert reason in (BACKENDS.refusal("cpu", CPU, (dataclasses.replace(PROBLEM, **change),)) or "")


@pytest.mark.parametrize("decode_only", [False, True])
def test_a_step_copies_no_states(decode_only: bool) -> None:
    case = Case("layers", (), num_layers=3, decode_only=decode_only)
    batch = make_batch(case)

    def step(states: DeltaStates, x: jax.Array, rows: DeltaRows) -> tuple[jax.Array, DeltaStates]:
        for layer in range(case.num_layers):
            out, states = gated_delta(x, batch.gates, batch.weights, states, layer, rows, Backend("cpu"))
            x = x.at[:, :, -case.value_dim :].add(out)
        return x, states

    compiled = jax.jit(step, donate_argnums=0).lower(batch.states, batch.products, batch.rows).compile()
    memory = compiled.memory_analysis()
    nbytes = sum(array.nbytes for array in jax.tree.leaves(batch.states))
    assert memory.alias_size_in_bytes == nbytes
    assert memory.temp_size_in_bytes < batch.products.nbytes * 4 < nbytes
