"""Each block of each tile is one core's, and each part of a tile has a place of its own."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import Scheme
from pallas_kernels.quantized_matmul.mosaic_gpu.plan import ProductPlan, make_plan, rule_sizes

INT4, INT8, FP8 = Scheme("int4", 128), Scheme("int8", 32), Scheme("fp8", 128, activations="group")
SHARED_MEMORY = 227 * 1024


def plan_of(shape: tuple[int, int], rows: int, scheme: Scheme = INT4, cores: int = 132) -> ProductPlan:
    return make_plan(*shape, rows, cores, scheme, rule_sizes(shape[0], rows, scheme))


@pytest.mark.parametrize("shape", [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (576, 1536), (64, 128)])
@pytest.mark.parametrize("rows", [1, 50, 2048])
def test_each_block_is_taken_once_and_each_part_written_once(shape: tuple[int, int], rows: int) -> None:
    plan = plan_of(shape, rows)
    cores = np.arange(plan.cores)
    bounds = np.asarray(plan.first_block(jnp.arange(plan.cores + 1, dtype=jnp.int32)))
    assert bounds[0] == 0
    assert bounds[-1] == plan.tiles * plan.blocks
    assert (np.diff(bounds) > 0).all()
    first = np.asarray(plan.first_core(jnp.arange(plan.tiles, dtype=jnp.int32)))
    for tile in range(plan.tiles):
        low, high = tile * plan.blocks, (tile + 1) * plan.blocks
        takers = cores[(bounds[:-1] < high) & (bounds[1:] > low)]
        np.testing.assert_array_equal(takers - first[tile], np.arange(plan.part_counts[tile]))


def test_few_rows_keep_all_cores_busy_and_many_rows_divide_no_tile() -> None:
    for shape in ((4096, 4096), (6144, 4096), (4096, 14336)):
        assert plan_of(shape, 1).cores == 132
        assert plan_of(shape, 1).parts > 1
        assert plan_of(shape, 2048).whole
    assert plan_of((28672, 4096), 64).whole


@pytest.mark.parametrize("scheme", [INT4, INT8, FP8], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 32, 64, 100, 4096])
@pytest.mark.parametrize("out_dim", [64, 192, 576, 4096])
def test_a_plan_fits_a_programs_shared_memory_and_keeps_blocks_in_flight(
    scheme: Scheme, rows: int, out_dim: int
) -> None:
    plan = plan_of((out_dim, 4096), rows, scheme)
    assert plan.output_tiles * plan.outputs == out_dim
    assert plan.token_tiles * plan.tokens >= rows
    assert plan.stages >= 3
    outputs = plan.outputs // plan.cluster
    operands = outputs * scheme.bits // 8 + plan.tokens * (1 if scheme is FP8 else 2)
    factors = 4 * max(plan.tokens, 32) * 128 // (scheme.group or 128)
    assert plan.stages * (128 * operands + factors) + 2 * outputs * plan.tokens < SHARED_MEMORY
