"""The kernel that quantizes rows in one pass, interpreted, does what XLA does in two."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import Backend, Scheme, quantized_matmul
from pallas_kernels.quantized_matmul import activations as module
from pallas_kernels.quantized_matmul.activations import LARGEST, SMALLEST_SCALE, quantize_inputs
from pallas_kernels.quantized_matmul.triton import inputs as kernel
from pallas_kernels.quantized_matmul.triton.inputs import quantize_rows
from pallas_kernels.target import CPU, KernelTarget
from tests.pallas_kernels.quantized_matmul.cases import Case, make_product


@pytest.mark.interpreted
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


@pytest.mark.interpreted
def test_rows_that_the_kernel_adds_are_dropped_from_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_kernel", lambda *_: True)
    added: list[int] = []

    def interpreted(x: jax.Array, rows: int, *others: object, interpret: bool) -> object:
        added.append(rows - len(x))
        return quantize_rows(x, rows, *others, interpret=True)  # type: ignore[arg-type]

    monkeypatch.setattr(kernel, "quantize_rows", interpreted)
    case = Case("padded", Scheme("fp8", activations="token"), rows=5)
    x, weight, expected, magnitude = make_product(case, Backend("xla", CPU))
    out = np.asarray(quantized_matmul(jnp.asarray(x), weight), np.float64)
    assert added == [11]
    np.testing.assert_array_less(np.abs(out - expected), 2.0**-20 * magnitude)


H200, A100 = KernelTarget("cuda", "NVIDIA H200", (9, 0)), KernelTarget("cuda", "NVIDIA A100", (8, 0))


@pytest.mark.parametrize(
    ("inputs", "size", "scheme", "target", "has"),
    [
        (4096, 4096, Scheme("fp8", activations="token"), H200, True),
        (14336, 128, Scheme("fp8", 128, activations="group"), H200, True),
        (14336, 14336, Scheme("int8", activations="token"), A100, True),
        (14336, 14336, Scheme("fp8", activations="token"), A100, False),
        (9600, 96, Scheme("int8", 96, activations="group"), H200, False),
        (2**15 + 1, 2**15 + 1, Scheme("int8", activations="token"), H200, False),
        (4096, 4096, Scheme("fp8", activations="static"), H200, False),
        (4096, 4096, Scheme("fp8", activations="token"), CPU, False),
    ],
    ids=str,
)
def test_which_rows_have_a_kernel(inputs: int, size: int, scheme: Scheme, target: KernelTarget, has: bool) -> None:
    assert module._has_kernel(inputs, size, scheme, target) == has
