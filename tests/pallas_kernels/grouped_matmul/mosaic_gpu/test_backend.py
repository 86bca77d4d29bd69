"""Mosaic GPU in the interpreter, with race detection: rows equal those in float64, and seeded bugs are found.

The interpreter ignores swizzles and registers, and two programs share all tiles, so that each takes several.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import BACKENDS, Gate, grouped_matmul
from pallas_kernels.grouped_matmul.mosaic_gpu import backend, kernel
from pallas_kernels.quantized_matmul import Backend, Scheme
from pallas_kernels.target import CPU, KernelTarget
from tests.pallas_kernels.grouped_matmul.cases import CASES, CLAMPED, INT4, MXFP4, SWIGLU, Case, make_case
from tests.selection import grid

H200 = KernelTarget("cuda", "NVIDIA H200", (9, 0), cores=132)
MOSAIC_GPU = Backend("mosaic_gpu", CPU)
REFUSED = frozenset({"bf16-narrow"})
# Of sizes that only this backend divides: inputs of half a block, outputs of half a tile, groups of a ring's slots.
OWN = (
    Case("bf16-half-tile", tokens=3, experts=4, out=192, inputs=192),
    Case("bf16-half-tile-up", tokens=3, experts=4, out=192, inputs=64, gate=SWIGLU, of_tokens=True),
    Case("bf16-undivided-gate", tokens=3, experts=4, out=32, inputs=64, gate=SWIGLU, bias=True, of_tokens=True),
    Case("int4-half-block", Scheme("int4", 64), tokens=3, experts=4, inputs=320),
    Case("fp4-half-block-up", MXFP4, tokens=3, experts=4, inputs=192, gate=CLAMPED, bias=True, of_tokens=True),
    Case("fp8-token-half-block", Scheme("fp8", activations="token"), tokens=3, experts=4, inputs=192, scales="float32"),
    Case("int8-static", Scheme("int8", activations="static"), tokens=3, experts=4, scales="float32"),
    Case("fp4-skewed", MXFP4, tokens=90, choices=1, experts=3, spread="one", inputs=128),
)
TABLE = tuple(case for case in CASES if case.name not in REFUSED) + OWN


def product(case: Case, out_dtype: object = jnp.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows that have a pair, those in float64, and the error allowed of each."""
    x, weight, groups, bias, expected, allowed = make_case(case, MOSAIC_GPU)
    bias = None if bias is None else jnp.asarray(bias)
    options = {"bias": bias, "gate": case.gate, "of_tokens": case.of_tokens, "target": CPU, "backend": MOSAIC_GPU}
    run = jax.jit(lambda *arguments: grouped_matmul(*arguments, out_dtype=out_dtype, **options))
    out = run(x, weight, groups)
    assert out.dtype == out_dtype
    return np.asarray(out, np.float64)[: len(expected)], expected, allowed


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "case", grid(TABLE, lambda case: case.name in ("bf16-one-token", "fp4-half-block-up", "fp8-blocks-down")), ids=str
)
def test_rows_are_those_of_float64_but_for_the_rounding_of_sums(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert BACKENDS.refusal("mosaic_gpu", CPU, (case.outputs, case.inputs, case.scheme)) is None
    found, expected, allowed = product(case)
    assert (np.abs(found - expected) <= allowed).all(), np.nanmax(np.abs(found - expected) / allowed)
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.interpreted
@pytest.mark.parametrize("case", grid((Case("rounded", tokens=4, experts=3, inputs=64),), lambda case: False), ids=str)
def test_the_kernel_rounds_whole_sums(case: Case) -> None:
    found, expected, allowed = product(case, jnp.bfloat16)
    assert (np.abs(found - expected) <= allowed + 2.0**-8 * np.abs(expected)).all()


BUGS = {
    "a-row-of-the-next-expert-is-written": ("tile.rows & -(2 * size)", "(tile.rows + 1) & -(2 * size)"),
    "rows-end-too-early": ("start_of(expert + 1) - row, tokens)", "start_of(expert + 1) - 1 - row, tokens)"),
    "the-weight-of-the-next-expert": ("pl.ds(tile.expert * outputs +", "pl.ds((tile.expert + 1) * outputs +"),
    "the-scale-of-the-first-expert": ("first = tile.expert * outputs +", "first = tile.expert * 0 +"),
    "the-second-tile-is-left-out": ("number = number + plan.programs", "number = number + 2 * plan.programs"),
    "read-before-it-arrived": ("plgpu.barrier_wait(arrived.at[slot])\n                    of_parts", "of_parts"),
    "a-slot-is-overwritten-too-early": ("pl.when(position >= stages)", "pl.when(position < 0)"),
    "a-stale-slot-is-read": ("add_scaled(total, operands, slot,", "add_scaled(total, operands, 0 * slot,"),
    "up-is-read-before-it-is-written": ("plgpu.barrier_wait(ups_written.at[pair])", "pass"),
    "up-is-overwritten-too-early": ("pl.when(tile.before > 0)", "pl.when(tile.before < 0)"),
}
SPOILT = Case("int4-spoilt", INT4, tokens=9, experts=3, inputs=1792, gate=Gate(), of_tokens=True, out=128)


@pytest.mark.interpreted
@pytest.mark.parametrize("bug", grid(BUGS, lambda bug: bug == "the-scale-of-the-first-expert"))
def test_a_case_finds_a_bug(bug: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each bug is put into a copy of the kernel's source."""
    source, (right, wrong) = inspect.getsource(kernel), BUGS[bug]
    assert source.count(right) == 1
    spoilt = types.ModuleType(kernel.__name__)
    # Its dataclass looks up its module.
    monkeypatch.setitem(sys.modules, kernel.__name__, spoilt)
    exec(compile(source.replace(right, wrong), "spoilt.py", "exec"), spoilt.__dict__)
    monkeypatch.setattr(backend, "MosaicGpuGroupedMatmul", spoilt.MosaicGpuGroupedMatmul)
    try:
        found, expected, allowed = product(SPOILT)
    except jax.errors.JaxRuntimeError:
        return
    right_rows = bool((np.abs(found - expected) <= allowed).all())
    assert "RACE DETECTED" in capsys.readouterr().out or not right_rows


@pytest.mark.parametrize(
    ("out_dim", "in_dim", "scheme", "reason"),
    [
        (96, 2048, None, "multiples of 64 outputs and 64 inputs, not 96 and 2048"),
        (768, 2080, None, "multiples of 64 outputs and 64 inputs, not 768 and 2080"),
        (768, 2880, Scheme("int4"), "multiples of 64 outputs and 128 inputs, not 768 and 2880"),
        (768, 2048, Scheme("int4", 16), "groups of 32, 64 or multiples of 128 inputs here, not of 16"),
        (768, 2048, Scheme("fp4", activations="token"), "quantized inputs by int8 and fp8 without zeros"),
    ],
)
def test_unsupported_experts_are_refused_with_a_reason(
    out_dim: int, in_dim: int, scheme: Scheme | None, reason: str
) -> None:
    assert reason in str(BACKENDS.refusal("mosaic_gpu", H200, (out_dim, in_dim, scheme)))


def test_it_is_for_hopper() -> None:
    for scheme in (None, MXFP4):
        assert BACKENDS.refusal("mosaic_gpu", H200, (5760, 2880, scheme)) is None
        for target in (KernelTarget("cuda", "NVIDIA B200", (10, 0)), KernelTarget("tpu")):
            assert BACKENDS.refusal("mosaic_gpu", target, (5760, 2880, scheme)) is not None


def test_other_floats_are_multiplied_by_the_reference() -> None:
    x, weight, groups, *_ = make_case(Case("float32", tokens=4, experts=3, inputs=64), MOSAIC_GPU)
    for inputs, experts in ((x.astype(jnp.float32), weight), (x, weight.astype(jnp.float32))):
        program = jax.make_jaxpr(functools.partial(grouped_matmul, target=CPU, backend=MOSAIC_GPU))
        assert "ragged_dot" in str(program(inputs, experts, groups))
