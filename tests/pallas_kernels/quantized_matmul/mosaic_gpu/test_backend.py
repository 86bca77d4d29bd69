"""Mosaic GPU in the interpreter, with race detection: products equal those in float64, and seeded bugs are found.

The interpreter ignores swizzles and registers, and can't multiply from registers: what is unpacked goes through shared
memory there. `test_unpack.py` checks which number stands in which register.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import BACKENDS, Backend, Scheme, quantized_matmul
from pallas_kernels.quantized_matmul.mosaic_gpu import backend, kernel, products
from pallas_kernels.quantized_matmul.tuning import kind_of
from pallas_kernels.target import CPU, KernelTarget
from tests.pallas_kernels.quantized_matmul.cases import Case, make_product
from tests.selection import grid

H200 = KernelTarget("cuda", "NVIDIA H200", (9, 0), cores=132)
FP8 = Scheme("fp8", 128, activations="group")
SIZES: dict[str, Any] = {"out": (64,), "inputs": 256}
WIDE = Case("wide", Scheme("int4", 128), rows=3, out=(2, 192), inputs=512, scales="bfloat16")
# Tiles of which a part is another program's, and a ring that is filled again and again.
DIVIDED = {"tokens": 8, "warpgroups": 1, "cluster": 1, "stages": 2}
SHARED = {"tokens": 16, "warpgroups": 1, "cluster": 2, "stages": 2}

CASES: list[tuple[Case, dict[str, int] | None]] = [
    (WIDE, None),
    (Case("int4-zeros-group-32", Scheme("int4", 32, zeros=True), rows=9, fractional=True, **SIZES), None),
    (Case("int4-group-64-order", Scheme("int4", 64), order=True, **SIZES), None),
    (Case("int4-group-256", Scheme("int4", 256), rows=1, out=(64,), inputs=512), DIVIDED),
    (Case("int4-channel", Scheme("int4"), rows=17, out=(192,), inputs=384), DIVIDED),
    (Case("int4-shared", Scheme("int4", 128, zeros=True), rows=33, out=(256,), inputs=384), SHARED),
    (Case("int8-zeros", Scheme("int8", 128, zeros=True), rows=20, scales="float16", **SIZES), None),
    (Case("int8-group-32", Scheme("int8", 32), **SIZES), None),
    (Case("int8-channel-divided", Scheme("int8"), rows=5, out=(192,), inputs=640), DIVIDED),
    (Case("int8-float32", Scheme("int8", 64), rows=2, dtype="float32", **SIZES), None),
    (Case("int4-float16", Scheme("int4", 128), rows=9, dtype="float16", **SIZES), None),
    (Case("fp4-row", Scheme("fp4", 32), rows=1, **SIZES), None),
    (Case("fp4-group-32", Scheme("fp4", 32), rows=20, scales="bfloat16", **SIZES), None),
    (Case("fp8-group-32", Scheme("fp8", 32), rows=5, **SIZES), None),
    (Case("fp8-channel", Scheme("fp8"), rows=33, scales="bfloat16", **SIZES), None),
    (Case("fp8-token", Scheme("fp8", activations="token"), rows=5, out=(64,), inputs=768), DIVIDED),
    (Case("int8-token", Scheme("int8", activations="token"), rows=9, out=(64,), inputs=768), DIVIDED),
    (Case("int8-static", Scheme("int8", activations="static"), rows=1, **SIZES), None),
    (Case("fp8-blocks", FP8, rows=12, out=(192,), inputs=384, scales="bfloat16"), None),
    (Case("fp8-blocks-shared", FP8, rows=20, out=(256,), inputs=256), SHARED),
    (Case("fp8-group-256", dataclasses.replace(FP8, group=256), rows=9, out=(128,), inputs=768), DIVIDED),
]


def multiply(case: Case, sizes: dict[str, int] | None, out_dtype: Any = jnp.float32) -> tuple[np.ndarray, ...]:
    """Return the product, that in float64 and its terms' magnitudes."""
    blocks = frozenset((kind_of(case.rows), name, size) for name, size in (sizes or {}).items())
    x, weight, expected, magnitude = make_product(case, Backend("mosaic_gpu", dataclasses.replace(CPU, blocks=blocks)))
    out = jax.jit(lambda x, weight: quantized_matmul(x, weight, out_dtype=out_dtype))(x, weight)
    assert out.dtype == out_dtype
    return np.asarray(out, np.float64), expected, magnitude


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("case", "sizes"),
    grid(CASES, lambda one: one[0].name in ("wide", "int4-shared", "int8-zeros", "fp4-row", "fp8-blocks")),
    ids=str,
)
def test_a_product_is_that_of_float64_but_for_the_rounding_of_its_sums(
    case: Case, sizes: dict[str, int] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    out, expected, magnitude = multiply(case, sizes)
    np.testing.assert_array_less(np.abs(out - expected), 2.0**-20 * magnitude)
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.interpreted
def test_whole_sums_are_rounded_by_the_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    case = Case("rounded", Scheme("int4", 128), rows=40, out=(320,), inputs=128)
    out, expected, magnitude = multiply(case, {**DIVIDED, "tokens": 16}, jnp.bfloat16)
    np.testing.assert_array_less(np.abs(out - expected), 2.0**-8 * np.abs(expected) + 2.0**-20 * magnitude)
    assert "RACE DETECTED" not in capsys.readouterr().out


BUGS = {
    "read-before-it-arrived": ("plgpu.barrier_wait(arrived.at[slot])", "pass"),
    "overwritten-before-it-is-free": ("pl.when(i - begin >= plan.stages)", "pl.when(i < begin)"),
    "another-tile's-part": ("out_ref.at[core - plan.first_core(tile),", "out_ref.at[0,"),
    "the-scale-of-the-first-block": (
        "slot, (_, _, block) = slot_of(i), plan.place(i)",
        "slot, block = slot_of(i), low * 0",
    ),
    "zeros-left-out": ("None if factors is not None else zero", "None"),
    "fractional-zeros-left-out": ("product - of_rows(zero, product) * factor", "product"),
    "a-group's-zero-is-another's": ("column(zero_ref, block, part)", "column(zero_ref, block * 0, part)"),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("bug", grid(BUGS, lambda bug: bug == "read-before-it-arrived"))
def test_the_cases_find_a_bug(bug: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each bug is put into a copy of the kernel's source."""
    right, wrong = BUGS[bug]
    [module] = [one for one in (kernel, products) if right in inspect.getsource(one)]
    source = inspect.getsource(module)
    assert source.count(right) == 1
    spoilt = types.ModuleType(module.__name__)
    # Its dataclass looks up its module.
    monkeypatch.setitem(sys.modules, module.__name__, spoilt)
    exec(compile(source.replace(right, wrong), "spoilt.py", "exec"), spoilt.__dict__)
    user, name = (backend, "MosaicGpuMatmul") if module is kernel else (kernel, "Products")
    monkeypatch.setattr(user, name, getattr(spoilt, name))
    fractional = bug.startswith("fractional")
    case = Case("divided", Scheme("int4", 128, zeros=True), rows=2, out=(128,), inputs=1024, fractional=fractional)
    try:
        out, expected, magnitude = multiply(case, DIVIDED)
    except jax.errors.JaxRuntimeError:
        return
    right_sums = bool(np.all(np.abs(out - expected) < 2.0**-20 * magnitude))
    assert "RACE DETECTED" in capsys.readouterr().out or not right_sums


@pytest.mark.parametrize(
    ("out_dim", "in_dim", "scheme", "reason"),
    [
        (100, 4096, Scheme("int4", 128), "multiples of 64 outputs and 128 inputs, not 100 and 4096"),
        (4096, 4000, Scheme("int4"), "multiples of 64 outputs and 128 inputs, not 4096 and 4000"),
        (4096, 4096, Scheme("int4", 16), "groups of 32, 64 or multiples of 128 inputs here, not of 16"),
        (4096, 4096, dataclasses.replace(FP8, group=64), "groups of multiples of 128 inputs here, not of 64"),
        (4096, 4096, Scheme("int4", activations="token"), "quantized inputs by int8 and fp8 without zeros"),
        (4096, 4096, Scheme("int8", zeros=True, activations="token"), "quantized inputs by int8 and fp8 without zeros"),
    ],
)
def test_unsupported_weights_are_refused_with_a_reason(out_dim: int, in_dim: int, scheme: Scheme, reason: str) -> None:
    assert reason in str(BACKENDS.refusal("mosaic_gpu", H200, (out_dim, in_dim, scheme)))


def test_it_is_for_hopper() -> None:
    scheme = Scheme("int4", 128)
    assert BACKENDS.refusal("mosaic_gpu", H200, (4096, 4096, scheme)) is None
    for target in (
        KernelTarget("cuda", "NVIDIA B200", (10, 0)),
        KernelTarget("cuda", "NVIDIA L4", (8, 9)),
        KernelTarget("tpu"),
    ):
        assert BACKENDS.refusal("mosaic_gpu", target, (4096, 4096, scheme)) is not None


def test_its_interpreter_needs_enough_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "2")
    assert "set NPROC=8" in str(BACKENDS.refusal("mosaic_gpu", CPU, (4096, 4096, Scheme("int4", 128))))
