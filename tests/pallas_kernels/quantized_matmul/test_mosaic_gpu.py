"""Mosaic GPU in the interpreter, with race detection."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import Backend, Scheme, quantized_matmul
from pallas_kernels.target import CPU
from tests.pallas_kernels.quantized_matmul.cases import Case, make_product

CASES = (
    Case("int4-row", Scheme("int4", 128), rows=1, out=(128,), inputs=512, scales="bfloat16"),
    Case("int8-zeros", Scheme("int8", 128, zeros=True), rows=20, out=(128,), inputs=256, scales="bfloat16"),
    Case("int4-zeros-group-32", Scheme("int4", 32, zeros=True), rows=9, out=(64,), inputs=256, fractional=True),
    Case("fp8-blocks", Scheme("fp8", 128, activations="group"), rows=12, out=(192,), inputs=384),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_product_is_that_of_float64_but_for_the_rounding_of_its_sums(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    x, weight, expected, magnitude = make_product(case, Backend("mosaic_gpu", CPU))
    out = np.asarray(jax.jit(quantized_matmul)(x, weight), np.float64)
    np.testing.assert_array_less(np.abs(out - expected), 2.0**-20 * magnitude)
    assert "RACE DETECTED" not in capsys.readouterr().out
