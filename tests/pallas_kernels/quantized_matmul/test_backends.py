"""Every backend passes the table of cases, but for those that it refuses, which are named here."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
import pytest

from pallas_kernels.dispatch import BackendName
from pallas_kernels.quantized_matmul import BACKENDS, Backend, Scheme, quantized_matmul
from pallas_kernels.target import CPU, KernelTarget
from tests.pallas_kernels.quantized_matmul.cases import CASES, Case, make_product
from tests.selection import grid, is_interpreted

REFUSED: dict[BackendName, frozenset[str]] = {
    "reference": frozenset(),
    "xla": frozenset(case.name for case in CASES if case.scheme.numbers == "int4" or case.scheme.group is not None),
    "triton": frozenset(),
    "mosaic_tpu": frozenset(
        case.name
        for case in CASES
        if case.scheme.numbers in ("fp4", "fp8")
        or case.scheme.activations is not None
        or case.inputs % (256 if case.scheme.numbers == "int4" else 32)
        or case.scheme.group == 96
    ),
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
    "int4-float16",
    "int4-float32",
    "int8-group-16",
    "int8-half-a-block",
    "int8-zeros",
    "int8-zeros-channel",
    "int8-float16",
    "fp8-channel",
    "fp8-float16",
    "fp8-blocks",
)
TABLE = grid(
    itertools.product(REFUSED, CASES),
    lambda one: not is_interpreted(one[0]) or one[1].name in QUICK,
    lambda one: is_interpreted(one[0]),
)


@pytest.mark.parametrize(("name", "case"), TABLE, ids=str)
def test_a_product_is_that_of_float64_but_for_the_rounding_of_its_sums(name: BackendName, case: Case) -> None:
    refusal = BACKENDS.refusal(name, CPU, (math.prod(case.out), case.inputs, case.scheme))
    assert (refusal is not None) == (case.name in REFUSED[name]), refusal
    if refusal is not None:
        return
    x, weight, expected, magnitude = make_product(case, Backend(name, CPU))
    out = np.asarray(jax.jit(quantized_matmul)(x, weight), np.float64)
    np.testing.assert_array_less(np.abs(out - expected), 2.0**-21 * magnitude)


@pytest.mark.parametrize(
    ("platform", "capability", "scheme", "name"),
    [
        ("cuda", (9, 0), Scheme("int4", 128), "triton"),
        ("cuda", (9, 0), Scheme("fp8", activations="token"), "xla"),
        ("cuda", (9, 0), Scheme("fp8", 128, activations="group"), "triton"),
        ("cuda", (8, 9), Scheme("int4", 128, zeros=True), "triton"),
        ("cuda", (8, 9), Scheme("fp8", 128, activations="group"), "triton"),
        ("cuda", (9, 0), Scheme("fp8"), "triton"),
        ("cuda", (8, 9), Scheme("int8"), "triton"),
        ("cuda", (8, 0), Scheme("fp8", activations="token"), "triton"),
        ("cuda", (8, 0), Scheme("int8", activations="token"), "xla"),
        ("cuda", (7, 5), Scheme("int4", 128), "reference"),
        ("tpu", None, Scheme("int8"), "xla"),
        ("tpu", None, Scheme("int4", 128), "mosaic_tpu"),
        ("cpu", None, Scheme("int8"), "reference"),
    ],
    ids=str,
)
def test_the_choice_depends_on_the_device_and_the_scheme(
    platform: str, capability: tuple[int, int] | None, scheme: Scheme, name: BackendName
) -> None:
    target = KernelTarget(platform, capability=capability)
    assert BACKENDS.choose(target, (4096, 4096, scheme)) == Backend(name, target)


@pytest.mark.parametrize(
    ("out_dim", "in_dim", "scheme", "reason"),
    [
        (4096, 4096, Scheme("int4", 48), "groups of int4 in multiples of 32"),
        (4096, 4096, Scheme("int8", 8), "groups of int8 in multiples of 16"),
        (2**19, 2**12, Scheme("int8", 128), "less than 2147483648 numbers"),
    ],
)
def test_triton_says_what_it_does_not_take(out_dim: int, in_dim: int, scheme: Scheme, reason: str) -> None:
    target = KernelTarget("cuda", "NVIDIA L4", (8, 9))
    refusal = BACKENDS.refusal("triton", target, (out_dim, in_dim, scheme))
    assert refusal is not None
    assert reason in refusal


def test_xla_takes_quantized_inputs_on_gpus_in_multiples_that_need_no_copy() -> None:
    target = KernelTarget("cuda", "NVIDIA L4", (8, 9))
    scheme = Scheme("fp8", activations="token")
    assert BACKENDS.choose(target, (4096, 4096, scheme)).name == "xla"
    assert BACKENDS.choose(target, (4096 + 8, 4096, scheme)).name == "triton"
