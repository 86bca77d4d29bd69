"""A window costs what its window holds: no backend computes blocks of pages that come before it.

That such pages may hold NaN, or the tokens of another row, is in the table of cases.
"""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import (
    KernelTarget,
    Problem,
    Rows,
    paged_attention,
    reference,
)
from pallas_kernels.paged_attention.mosaic_gpu import decode as mosaic_decode
from pallas_kernels.paged_attention.mosaic_gpu.parts import MosaicGpuAttention
from pallas_kernels.paged_attention.mosaic_tpu import backend as mosaic_tpu
from pallas_kernels.paged_attention.mosaic_tpu.memory import Copies, KernelOperands, LoopSizes, TpuAttention
from pallas_kernels.paged_attention.triton import block_sizes
from pallas_kernels.paged_attention.triton import decode as triton_decode
from pallas_kernels.paged_attention.triton.tiles import TritonAttention
from tests.pallas_kernels.paged_attention import test_paged_attention as suite
from tests.pallas_kernels.paged_attention.cases import (
    Case,
    first_seen,
    make_batch,
    options_of,
    rows_of,
)

BF16 = np.dtype(jnp.bfloat16)
WINDOW = 1000
LENGTHS = jnp.asarray([100_000, 5000, 1500, 1], jnp.int32)


def test_triton_lists_tiles_of_the_window_only() -> None:
    attention = TritonAttention(8, 4, 128, 16, 8000, 16000, 0.1, WINDOW, None, False)
    target = KernelTarget("cuda", "NVIDIA H200", (9, 0), cores=132)
    blocks = block_sizes.decode_blocks_for(Problem(32, 8, 128, 16, BF16, BF16), target, rows=4)
    first, end, _ = triton_decode._tiles(LENGTHS, attention, blocks)
    most = -(-WINDOW // blocks.block_kv) + 1
    assert (end - first).tolist()[-1] == 1
    assert max((end - first).tolist()) <= most


def test_mosaic_gpu_splits_the_window_only() -> None:
    options: dict[str, Any] = {"block": 64, "stages": 2, "warpgroups": 1, "p_smem": False, "converts": False}
    attention = MosaicGpuAttention(8, 4, 128, 16, 0.1, WINDOW, None, interpret=False, **options)
    first, _, end = mosaic_decode._split(LENGTHS, 8, attention)
    assert (end - first).tolist()[-1] == 1
    assert max((end - first).tolist()) <= -(-WINDOW // 64) + 1


@pytest.mark.parametrize("new", [1, 300])
def test_a_tpu_reads_blocks_of_the_window_only(new: int) -> None:
    attention = TpuAttention(8, 4, 128, 16, 16, BF16, BF16, False, 0.1, WINDOW, None, True)
    sizes = LoopSizes(1 if new == 1 else 64, 4, 1)
    lengths = jnp.maximum(LENGTHS, new)
    starts = jnp.arange(5, dtype=jnp.int32) * new
    tiles: Any = (4, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))
    if new > 1:
        own = Rows(jnp.zeros((4, 1), jnp.int32), starts, lengths, jnp.int32(0), jnp.int32(4))
        tiles = mosaic_tpu._tiles(own, 4 * new, attention, sizes)
    count, rows, numbers = tiles
    operands = KernelOperands(None, starts, lengths, rows, numbers, None, None, None, None, ())
    copies = Copies(attention, sizes, operands, None, None)  # type: ignore[arg-type]
    blocks = jax.jit(jax.vmap(lambda i: copies.tile(i).num_blocks))(jnp.arange(int(count)))
    assert blocks[0] > 1
    assert blocks.max() <= -(-WINDOW // (4 * 16)) + 1


@pytest.mark.slow  # Its operations are compiled one by one.
@pytest.mark.parametrize("num_decodes", [0, 3])
def test_the_reference_reads_blocks_of_the_window_only(num_decodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the turns of its loops, which are loops of Python's if nothing is compiled."""
    rows = ((700, 1), (40, 1), (900, 1)) if num_decodes else ((900, 9),)
    case = Case("far", rows, num_decodes, window=50, heads=2, kv_heads=1, head_dim=16, decode_only=num_decodes > 0)
    batch = make_batch(case)
    advance, turns = reference._advance, list[int]()

    def counted(*args: Any) -> Any:
        turns.append(1)
        return advance(*args)

    monkeypatch.setattr(reference, "_advance", counted)
    with jax.disable_jit():
        paged_attention(
            *(jnp.asarray(x) for x in (batch.q, batch.k, batch.v)),
            suite._pool(case, batch, ""),
            jnp.int32(case.layer),
            jax.tree.map(jnp.asarray, rows_of(case, batch)),
            options_of(case, batch),
        )
    assert len(turns) in (1, 2)


def poisoned(decode_only: bool) -> None:
    """Check a case on the CPU's backend whose page ids before windows are far outside of the pool."""
    rows = ((2000, 1), (700, 1), (90, 1)) if decode_only else ((2000, 40), (700, 300), (90, 90))
    case = Case("poisoned", rows, 3 if decode_only else 0, window=100, pad_rows=0, decode_only=decode_only)
    batch = make_batch(case)
    table = batch.page_table.copy()
    for row, (length, new) in enumerate(rows):
        table[row, : first_seen(case, length, new) // case.page_size] = 2**30
    suite._check(case, dataclasses.replace(batch, page_table=table), "cpu")


@pytest.mark.slow  # A read of such a page ends the process, so it is another one, which imports jax.
@pytest.mark.parametrize("decode_only", [False, True])
def test_the_cpus_kernel_reads_no_page_before_the_window(decode_only: bool) -> None:
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=False)
    done = run([sys.executable, "-c", f"from {__name__} import poisoned; poisoned({decode_only})"])
    assert done.returncode == 0, done.stderr
