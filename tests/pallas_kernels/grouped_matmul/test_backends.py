"""Every backend passes the table of cases, but for those that it refuses, which are named here."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from pallas_kernels.dispatch import BackendName
from pallas_kernels.grouped_matmul import BACKENDS, grouped_matmul
from pallas_kernels.quantized_matmul import Backend
from pallas_kernels.target import CPU
from tests.pallas_kernels.grouped_matmul.cases import CASES, Case, make_case
from tests.selection import grid

REFUSED: dict[BackendName, frozenset[str]] = {
    "triton": frozenset(),
    "mosaic_tpu": frozenset(
        case.name
        for case in CASES
        if case.scheme is not None and (case.scheme.numbers in ("fp4", "fp8") or case.scheme.activations is not None)
    ),
}
# What kernels, which are interpreted here, compute in `make test`.
QUICK = ("bf16-up", "bf16-absent", "bf16-up-clamped", "int4-up", "fp8-blocks", "fp4-down")
TABLE = grid(itertools.product(REFUSED, CASES), lambda one: one[1].name in QUICK)


@pytest.mark.interpreted
@pytest.mark.parametrize(("name", "case"), TABLE, ids=str)
def test_rows_are_those_of_float64_but_for_the_rounding_of_sums(name: BackendName, case: Case) -> None:
    refusal = BACKENDS.refusal(name, CPU, (case.outputs, case.inputs, case.scheme))
    assert (refusal is not None) == (case.name in REFUSED[name]), refusal
    if refusal is not None:
        return
    backend = Backend(name, CPU)
    x, weight, groups, bias, expected, allowed = make_case(case, backend)
    options = {"gate": case.gate, "of_tokens": case.of_tokens, "target": CPU, "backend": backend}
    multiply = jax.jit(lambda bias, *arguments: grouped_matmul(*arguments, bias=bias, **options))
    out = multiply(bias, x, weight, groups)
    found = np.asarray(out)[: len(expected)].astype(np.float64)
    assert (np.abs(found - expected) <= allowed).all(), np.nanmax(np.abs(found - expected) / allowed)
