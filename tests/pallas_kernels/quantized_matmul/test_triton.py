"""Block sizes of the Triton backend."""

from __future__ import annotations

import dataclasses

import pytest

from pallas_kernels.quantized_matmul import Scheme
from pallas_kernels.quantized_matmul.triton.backend import blocks_for, candidates
from pallas_kernels.quantized_matmul.triton.kernel import Blocks
from pallas_kernels.target import KernelTarget
from pallas_kernels.tuning import Kind

A100 = KernelTarget("cuda", "NVIDIA A100", (8, 0), cores=108)
INT4 = Scheme("int4", 128)


@pytest.mark.parametrize(
    ("rows", "out_dim", "in_dim", "scheme", "expected"),
    [
        (1, 14336, 4096, INT4, Blocks(64, 16, 1, 4, 4)),
        (1, 4096, 14336, INT4, Blocks(64, 16, 6, 4, 4)),
        (64, 4096, 14336, INT4, Blocks(64, 64, 3, 4, 4)),
        (128, 14336, 4096, INT4, Blocks(64, 64, 1, 4, 4)),
        (2048, 14336, 4096, INT4, Blocks(128, 128, 1, 8, 3)),
        (2048, 14336, 4096, Scheme("int4", 128, zeros=True), Blocks(128, 64, 1, 8, 3)),
    ],
)
def test_tiles_and_splits_fill_the_device(
    rows: int, out_dim: int, in_dim: int, scheme: Scheme, expected: Blocks
) -> None:
    assert blocks_for(rows, out_dim, in_dim, scheme, A100) == expected


@pytest.mark.parametrize(("kind", "rows"), [("decode", 8), ("prefill", 512)])
def test_the_callers_sizes_precede_the_rule(kind: Kind, rows: int) -> None:
    for sizes in candidates(kind):
        target = dataclasses.replace(A100, blocks=frozenset((kind, name, size) for name, size in sizes.items()))
        chosen = dataclasses.asdict(blocks_for(rows, 4096, 4096, INT4, target))
        assert sizes.items() <= chosen.items()
