"""Tiles cover all outputs and inputs, fit a program's shared memory, and leave no core idle without need."""

from __future__ import annotations

import pytest

from pallas_kernels.grouped_matmul.mosaic_gpu.plan import GroupedPlan, make_plan
from pallas_kernels.quantized_matmul import Scheme

INT4, MXFP4, FP8 = Scheme("int4", 128), Scheme("fp4", 32), Scheme("fp8", 128, activations="group")
SHARED_MEMORY = 227 * 1024


def plan_of(
    results: int, rows: int, scheme: Scheme | None = None, *, gated: bool = False, experts: int = 128
) -> GroupedPlan:
    in_place = scheme is None
    return make_plan(results, 2880, (rows, rows), experts, 132, scheme, in_place=in_place, gated=gated, out_bytes=2)


@pytest.mark.parametrize("scheme", [None, INT4, MXFP4, FP8], ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("results", [64, 768, 2880])
@pytest.mark.parametrize("rows", [4, 64, 512, 2048, 32768])
def test_a_plan_fits_a_programs_shared_memory_and_keeps_blocks_in_flight(
    scheme: Scheme | None, gated: bool, results: int, rows: int
) -> None:
    plan = plan_of(results, rows, scheme, gated=gated)
    tile = plan.warpgroups * 64
    assert plan.output_tiles * tile >= results * (2 if gated else 1)
    assert plan.blocks * plan.block >= 2880
    assert plan.stages >= 3
    x_bytes = 1 if scheme is FP8 else 2
    stage = plan.block * (tile * (scheme.bits if scheme else 16) // 8 + plan.tokens * x_bytes)
    factors = 4 * 128 if scheme is FP8 else 0
    written = plan.tokens * tile * (3 if gated else 2)
    assert plan.stages * (stage + factors) + written < SHARED_MEMORY


def test_a_decode_step_reads_the_weight_of_most_experts_once_and_keeps_cores_busy() -> None:
    for scheme in (None, INT4, MXFP4, FP8):
        assert plan_of(768, 64 * 8, scheme, gated=True).tokens == 8
        assert plan_of(768, 64 * 8, scheme, gated=True).programs == 132
        # 8 experts of 12 tiles each, and 29 experts: in tiles twice as large, some cores would have two, others one.
        one, four = plan_of(768, 8, scheme, gated=True), plan_of(768, 4 * 8, scheme, gated=True)
        assert (one.warpgroups, one.programs) == (2, 96)
        assert (four.warpgroups, four.programs) == (2, 132)
        assert plan_of(768, 64 * 8, scheme, gated=True).warpgroups == 4


def test_many_rows_take_as_many_as_registers_hold_sums_for() -> None:
    assert [plan_of(768, 32768, scheme).tokens for scheme in (None, INT4, MXFP4)] == [128, 80, 48]


def test_pairs_of_experts_elsewhere_make_no_larger_tiles_but_have_programs() -> None:
    sizes = {"in_place": True, "gated": False, "out_bytes": 2}
    some = make_plan(768, 2880, (512, 8 * 512), 16, 132, None, **sizes)
    assert some.tokens == plan_of(768, 512, experts=16).tokens < plan_of(768, 8 * 512, experts=16).tokens
    assert some.programs == min(132, some.output_tiles * (16 + 8 * 512 // some.tokens))
