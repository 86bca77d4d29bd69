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

REFUSED: dict[BackendName, frozenset[str]] = {
    "reference": frozenset(),
    "xla": frozenset(case.name for case in CASES if case.scheme.numbers == "int4" or case.scheme.group is not None),
    "triton": frozenset(),
}


@pytest.mark.parametrize(("name", "case"), [*itertools.product(REFUSED, CASES)], ids=str)
def test_a_product_is_that_of_float64_but_for_the_rounding_of_its_sums(name: BackendName, case: Case) -> None:
    refusal = backend_module(name).refusal(math.prod(case.out), case.inputs, case.scheme, CPU)
    assert (refusal is not None) == (case.name in REFUSED[name]), refusal
    if refusal is not None:
        return
    x, weight, expected, magnitude = make_product(case, Backend(name, CPU))
    out = np.asarray(jax.jit(quantized_matmul)(x, weight), np.float64)
    np.testing.assert_array_less(np.abs(out - expected), 2.0**-20 * magnitude)
