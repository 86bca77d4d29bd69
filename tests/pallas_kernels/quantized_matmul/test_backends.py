"""Every backend passes the table of cases, but for those that it refuses, which are named here."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import Backend, quantized_matmul
from pallas_kernels.quantized_matmul.backends import BackendName, backend_module
from pallas_kernels.target import CPU
from tests.pallas_kernels.quantized_matmul.cases import CASES, Case, make_product
from tests.selection import grid

REFUSED: dict[BackendName, frozenset[str]] = {
    "reference": frozenset(),
    "xla": frozenset(case.name for case in CASES if case.scheme.numbers == "int4" or case.scheme.group is not None),
    "triton": frozenset(),
}
# What kernels, which are interpreted here, compute in `make test`.
QUICK = (
    "int4-row",
    "int4-wide",
    "int4-many-rows",
    "int4-group-64",
    "int4-group-96",
    "int4-channel",
    "int4-zeros-fractional",
    "int4-float32",
    "int8-group-16",
    "int8-zeros",
    "int8-zeros-channel",
    "fp8-channel",
    "fp8-blocks",
)
TABLE = grid(itertools.product(REFUSED, CASES), lambda one: one[0] in ("reference", "xla") or one[1].name in QUICK)


@pytest.mark.parametrize(("name", "case"), TABLE, ids=str)
def test_a_product_is_that_of_float64_but_for_the_rounding_of_its_sums(name: BackendName, case: Case) -> None:
    refusal = backend_module(name).refusal(math.prod(case.out), case.inputs, case.scheme, CPU)
    assert (refusal is not None) == (case.name in REFUSED[name]), refusal
    if refusal is not None:
        return
    x, weight, expected, magnitude = make_product(case, Backend(name, CPU))
    out = np.asarray(jax.jit(quantized_matmul)(x, weight), np.float64)
    np.testing.assert_array_less(np.abs(out - expected), 2.0**-20 * magnitude)
