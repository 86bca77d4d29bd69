"""The kernel that quantizes rows in one pass, interpreted, does what XLA does in two."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import Backend, Scheme
from pallas_kernels.quantized_matmul.activations import LARGEST, SMALLEST_SCALE, quantize_inputs
from pallas_kernels.quantized_matmul.triton.inputs import quantize_rows


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("numbers", ["int8", "fp8"])
@pytest.mark.parametrize(("inputs", "group"), [(384, None), (200, None), (384, 64), (320, 32)])
def test_one_pass_gives_the_numbers_and_the_factors_of_two(
    inputs: int, group: int | None, numbers: str, dtype: jnp.dtype
) -> None:
    scheme = Scheme("fp8" if numbers == "fp8" else "int8", group, activations="group" if group else "token")
    x = np.random.default_rng(inputs).standard_normal((5, inputs)) * 10.0 ** np.arange(-3, 2)[:, None]
    x[3] = 0
    x = jnp.asarray(x, dtype)
    expected, factors = jax.jit(lambda x: quantize_inputs(x, scheme, None, Backend(), one_pass=False))(x)
    found, found_factors = quantize_rows(
        x, 8, group or inputs, expected.dtype, LARGEST[scheme.numbers], SMALLEST_SCALE, interpret=True
    )
    assert found.dtype == expected.dtype
    # The last row fills the others
    expected, factors = (np.pad(np.asarray(y), ((0, 3), (0, 0)), mode="edge") for y in (expected, factors))
    np.testing.assert_allclose(found_factors, factors, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))
