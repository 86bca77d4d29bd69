"""The Triton backend beyond the table of cases: block sizes, the number of tiles, and other types of inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_routing.reference import group_by_expert
from pallas_kernels.grouped_matmul import BACKENDS, grouped_matmul
from pallas_kernels.grouped_matmul.triton.backend import blocks_for, candidates
from pallas_kernels.grouped_matmul.triton.kernel import GroupedBlocks, most_tiles
from pallas_kernels.grouped_matmul.tuning import Experts
from pallas_kernels.quantized_matmul import Backend, Scheme
from pallas_kernels.target import CPU, KernelTarget
from pallas_kernels.tuning import Kind
from tests.pallas_kernels.quantized_matmul import cases as products

A100 = KernelTarget("cuda", "NVIDIA A100", (8, 0), cores=108)
QWEN_UP = Experts(128, 2 * 768, 2048, True, None)
MIXTRAL_DOWN = Experts(8, 4096, 14336, False, None)
GGUF = Experts(128, 2 * 768, 2048, True, Scheme("int8", 32, zeros=True))


@pytest.mark.parametrize(
    ("rows", "experts", "expected"),
    [
        (8, QWEN_UP, GroupedBlocks(64, 16, 4, 4)),
        (64, QWEN_UP, GroupedBlocks(128, 16, 4, 4)),
        (2048, QWEN_UP, GroupedBlocks(128, 32, 4, 4)),
        (8192, QWEN_UP, GroupedBlocks(128, 64, 8, 3)),
        (16384, QWEN_UP, GroupedBlocks(128, 128, 8, 3)),
        (2, MIXTRAL_DOWN, GroupedBlocks(32, 16, 4, 4)),
        (128, MIXTRAL_DOWN, GroupedBlocks(64, 32, 4, 4)),
        (16384, dataclasses.replace(QWEN_UP, scheme=Scheme("int4", 128)), GroupedBlocks(128, 64, 8, 3)),
        (16384, GGUF, GroupedBlocks(128, 32, 8, 3)),
    ],
    ids=str,
)
def test_tiles_hold_the_rows_of_most_experts(rows: int, experts: Experts, expected: GroupedBlocks) -> None:
    assert blocks_for(rows, experts, A100) == expected


@pytest.mark.parametrize(("kind", "rows"), [("decode", 64), ("prefill", 8192)])
def test_the_callers_sizes_precede_the_rule(kind: Kind, rows: int) -> None:
    for sizes in candidates(kind):
        target = dataclasses.replace(A100, blocks=frozenset((kind, name, size) for name, size in sizes.items()))
        assert sizes.items() <= dataclasses.asdict(blocks_for(rows, QWEN_UP, target)).items()


@pytest.mark.parametrize(("rows", "experts", "block_rows"), [(1, 8, 16), (64, 128, 16), (300, 7, 32), (2048, 3, 64)])
def test_there_are_as_many_tiles_as_the_worst_numbers_of_rows_need(rows: int, experts: int, block_rows: int) -> None:
    # One row too many in the tiles of as many experts as possible, and the other rows in full tiles of the first one.
    each = np.array([1] * min(rows, experts))
    each[0] += (rows - len(each)) // block_rows * block_rows
    assert most_tiles(rows, experts, block_rows) >= sum(-(-each // block_rows))
    drawn = np.random.default_rng(0).multinomial(rows, [1 / experts] * experts, size=50)
    assert most_tiles(rows, experts, block_rows) >= (-(-drawn // block_rows)).sum(axis=1).max()


def _rows(x: Any, weight: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of `count` experts, which tokens choose in turn, and each row's expert."""
    ids = np.arange(len(x), dtype=np.int32)[:, None] % count
    groups = group_by_expert(jnp.asarray(ids), count)
    options: dict[str, Any] = {"of_tokens": True, "target": CPU, "backend": Backend("triton")}
    return np.asarray(grouped_matmul(jnp.asarray(x), weight, groups, **options)), np.sort(ids[:, 0])


@pytest.mark.interpreted
@pytest.mark.parametrize("types", [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")], ids=str)
def test_types_that_differ_are_multiplied_exactly(types: tuple[str, str]) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 96)).astype(jnp.dtype(types[0]))
    weight = rng.standard_normal((3, 40, 96)).astype(jnp.dtype(types[1]))
    found, experts = _rows(x, jnp.asarray(weight), 3)
    order = np.argsort(np.arange(6) % 3, kind="stable")
    exact = np.einsum("ri,roi->ro", x.astype(np.float64)[order], weight.astype(np.float64)[experts])
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "case",
    [
        products.Case("float32", Scheme("int4", 32), 6, (3, 40), 128, "float32"),
        products.Case("fractional", Scheme("int8", 32, zeros=True), 6, (3, 40), 128, fractional=True),
        products.Case("fractional-channel", Scheme("int8", zeros=True), 6, (3, 40), 128, fractional=True),
    ],
    ids=str,
)
def test_inputs_of_32_bits_and_zeros_that_are_not_whole(case: products.Case) -> None:
    x, weight, terms, magnitudes = products.make_terms(case, Backend("triton"))
    found, experts = _rows(x, weight, 3)
    inputs = x.astype(np.float64)[np.argsort(np.arange(6) % 3, kind="stable")]
    exact, allowed = (
        np.einsum("ri,roi->ro", a, b.reshape(3, 40, -1)[experts])
        for a, b in ((inputs, terms), (np.abs(inputs), magnitudes))
    )
    np.testing.assert_array_less(np.abs(found - exact), 2.0**-20 * allowed)


def test_inputs_that_fill_no_product_are_refused() -> None:
    refusal = BACKENDS.refusal("triton", A100, (64, 40, None))
    assert refusal == "triton takes experts with inputs in multiples of 16, not 40"
