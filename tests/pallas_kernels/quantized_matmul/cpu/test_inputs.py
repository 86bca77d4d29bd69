"""A CPU rounds inputs in float32: the results equal those of a conversion to 8 bits."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import Backend, Scheme
from pallas_kernels.quantized_matmul.activations import quantize_inputs
from pallas_kernels.quantized_matmul.cpu.inputs import round_inputs, round_to_fp8


def test_the_neighbours_of_every_number_and_every_tie_become_the_nearest_fp8() -> None:
    numbers = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    exact = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2]).view(np.int32)
    near = np.maximum(exact[:, None] + np.arange(-2, 3, dtype=np.int32), 0).view(np.float32).clip(0, 448)
    values = np.concatenate([near, -near])
    expected = values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(round_to_fp8)(values), expected)


@pytest.mark.parametrize("numbers", ["int8", "fp8"])
@pytest.mark.parametrize("activations", ["token", "static", "group"])
def test_rounded_inputs_equal_quantized_ones(numbers: Any, activations: Any) -> None:
    scheme = Scheme(numbers, group=64 if activations == "group" else None, activations=activations)
    x = np.random.default_rng(0).standard_normal((5, 256)) * np.exp2(np.random.default_rng(1).integers(-9, 3, (5, 256)))
    x[2] = 0
    given = jnp.asarray(x, jnp.bfloat16), scheme, jnp.full(1, 0.01) if activations == "static" else None
    quantize = functools.partial(quantize_inputs, backend=Backend(), one_pass=False)
    (found, factors), (expected, others) = (jax.jit(f, static_argnums=1)(*given) for f in (round_inputs, quantize))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(jnp.float32), expected.astype(jnp.float32))
    np.testing.assert_array_equal(factors, others)
