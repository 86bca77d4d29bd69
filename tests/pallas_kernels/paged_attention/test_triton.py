"""Triton's work list names each part once, long rows first; splits depend on a row's own length."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import KernelTarget, Problem, kv_layout
from pallas_kernels.paged_attention.triton import backend, block_sizes, latent_sizes
from pallas_kernels.paged_attention.triton.work_list import work_list

BF16 = np.dtype(jnp.bfloat16)
LLAMA = Problem(32, 8, 128, 16, BF16, BF16)
DEEPSEEK = Problem(128, 1, 576, 64, BF16, BF16, value_dim=512)
H200 = KernelTarget("cuda", "NVIDIA H200", (9, 0), cores=132)


def test_a_work_list_has_each_part_once_and_long_rows_first() -> None:
    work = work_list(jnp.array([1, 3, 0, 2]), jnp.array([50, 90, 70, 50]), 8)
    count = int(work.total[0])
    listed = list(zip(work.rows[:count].tolist(), work.parts[:count].tolist(), strict=True))
    assert listed == [(1, 0), (1, 1), (1, 2), (0, 0), (3, 0), (3, 1)]


def test_without_rows_a_work_list_is_empty() -> None:
    assert int(work_list(jnp.zeros(3, jnp.int32), jnp.array([5, 6, 7]), 6).total[0]) == 0


@pytest.mark.parametrize("layers", [0, 2])
def test_all_pages_of_a_small_pool_are_addressable(layers: int) -> None:
    layout = kv_layout(num_layers=layers, num_pages=9, page_size=16, num_kv_heads=2, head_dim=64, dtype=BF16)
    assert backend.addressable_pages(layout, 2) == 9


@pytest.mark.parametrize("rows", [1, 16, 64, 256])
def test_splits_fill_the_device_and_partial_sums_stay_small(rows: int) -> None:
    blocks = block_sizes.decode_blocks_for(LLAMA, H200, rows=rows)
    assert blocks.programs == 3 * 132
    assert blocks.splits * rows * LLAMA.kv_heads >= blocks.programs or blocks.splits == block_sizes._MAX_SPLITS
    assert blocks.splits <= blocks.most_splits
    assert blocks.most_splits * rows * LLAMA.heads * LLAMA.head_dim * 4 <= block_sizes._PARTIAL_BYTES


def test_an_unknown_gpu_has_hoppers_cores() -> None:
    known = block_sizes.prefill_blocks_for(LLAMA, H200)
    assert block_sizes.prefill_blocks_for(LLAMA, dataclasses.replace(H200, cores=None)) == known
    assert block_sizes.prefill_blocks_for(LLAMA, dataclasses.replace(H200, cores=10)).programs == 10


@pytest.mark.parametrize(("heads", "group"), [(128, 32), (64, 32), (40, 20), (16, 16), (71, 1)])
def test_tiles_divide_the_heads_that_share_latent_rows(heads: int, group: int) -> None:
    assert latent_sizes.group_of(heads, 32) == group


@pytest.mark.parametrize("rows", [1, 16, 256])
def test_splits_of_latent_rows_fill_the_device_once(rows: int) -> None:
    blocks = block_sizes.decode_blocks_for(DEEPSEEK, H200, rows=rows)
    assert blocks.programs == 132
    assert (blocks.splits - 1) * rows * 4 < blocks.programs <= blocks.splits * rows * 4
    few = dataclasses.replace(DEEPSEEK, heads=16)
    assert block_sizes.decode_blocks_for(few, H200, rows=rows).programs == 2 * 132
    assert block_sizes.decode_blocks_for(few, H200, rows=rows, queries=5).queries == 2


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA L4"])
def test_the_candidates_for_latent_rows_include_the_rules_sizes(heads: int, kind: str) -> None:
    target = KernelTarget("cuda", kind, {"NVIDIA H200": (9, 0), "NVIDIA L4": (8, 9)}.get(kind, (8, 0)))
    problem = dataclasses.replace(DEEPSEEK, heads=heads)
    assert latent_sizes.decode_sizes(problem, target, 1) in backend.candidates("decode", problem, target)
    assert latent_sizes.prefill_sizes(problem, target) in backend.candidates("prefill", problem, target)


@pytest.mark.parametrize("problem", [LLAMA, dataclasses.replace(LLAMA, head_dim=512)], ids=["128", "512"])
def test_the_candidates_include_the_rules_sizes(problem: Problem) -> None:
    assert block_sizes._decode_sizes(problem, H200) in backend.candidates("decode", problem, H200)
    assert block_sizes._prefill_sizes(problem, H200) in backend.candidates("prefill", problem, H200)
