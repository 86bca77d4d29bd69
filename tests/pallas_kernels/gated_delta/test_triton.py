"""The Triton kernels, interpreted; what they refuse; and that programs of a row may run in any order."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Backend
from pallas_kernels.gated_delta import BACKENDS, BLOCK, DeltaProblem, choose_backend
from pallas_kernels.gated_delta.triton.backend import gated_delta as compute
from pallas_kernels.gated_delta.triton.decode import reads_and_writes_apart
from pallas_kernels.target import CPU, KernelTarget
from tests.pallas_kernels.gated_delta.cases import CASES, CORNERS, Case, check, empty_states, make_batch
from tests.pallas_kernels.gated_delta.test_gated_delta import run, skip_refused
from tests.selection import grid

PROBLEM = DeltaProblem(16, 32, 128, 128, 4, np.dtype(jnp.bfloat16))
H200 = KernelTarget("cuda", "NVIDIA H200", (9, 0))


@pytest.mark.interpreted
@pytest.mark.parametrize("case", grid(CASES, lambda case: case.name in CORNERS), ids=str)
def test_equals_a_loop_over_tokens(case: Case) -> None:
    skip_refused(case, "triton")
    batch = make_batch(case)
    check(case, batch, *run(case, batch, "triton"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": np.dtype(np.int8)}, "in float32, bfloat16, float16, not in int8"),
        ({"key_dim": 96}, "keys of 16 to 128 numbers, a power of two, not of 96"),
        ({"key_dim": 256}, "keys of 16 to 128 numbers, a power of two, not of 256"),
        ({"value_dim": 40}, "values of a multiple of 16 numbers, not of 40"),
        ({"taps": 1}, "convolutions of 2 taps or more, not of 1"),
    ],
)
def test_what_is_not_supported_is_refused(change: dict[str, Any], reason: str) -> None:
    assert choose_backend(H200, PROBLEM).name == "triton"
    assert reason in (BACKENDS.refusal("triton", H200, (dataclasses.replace(PROBLEM, **change),)) or "")


@pytest.mark.parametrize("drafts", [0, 1, 3, 7, 8, 9, 16])
@pytest.mark.parametrize("queries", [1, 2, 4, 8, 9, 17])
def test_decodes_read_no_entry_that_they_write(drafts: int, queries: int) -> None:
    layout = Case("", (), max_drafts=drafts).layout
    states = empty_states(Case("", (), max_drafts=drafts), 1, 1)
    collides = any(
        {p % layout.ring for p in range(folded, lens)} & {p % layout.ring for p in range(lens, lens + queries)}
        or {p % layout.recent for p in range(lens - 3, lens)} & {p % layout.recent for p in range(lens, lens + queries)}
        for folded in (0, BLOCK)
        for lens in range(folded, folded + BLOCK + drafts)
    )
    assert reads_and_writes_apart(states, layout.taps, queries) == (not collides)
    if queries <= 1 + drafts <= BLOCK // 2:
        assert not collides


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("decode", ["gated_delta_decode"]),
        ("drafts", ["gated_delta_decode"]),
        ("mixed", ["gated_delta_convolution", "gated_delta_chunks"]),
    ],
)
def test_decodes_are_one_kernel(name: str, kernels: list[str]) -> None:
    case = next(case for case in CASES if case.name == name)
    batch = make_batch(case)
    arguments = batch.products, batch.gates, batch.weights, batch.states, 1, batch.rows
    jaxpr = jax.make_jaxpr(compute, static_argnums=6)(*arguments, Backend("triton", CPU))
    found = [one.params["name"] for one in jaxpr.eqns if one.primitive.name == "pallas_call"]
    assert found == kernels
