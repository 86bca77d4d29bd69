"""The list of the blocks that a step computes, row after row, and what each reads and writes."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.gated_delta.arguments import DeltaRows
from pallas_kernels.gated_delta.layout import BLOCK
from pallas_kernels.gated_delta.reference import writes_target


class BlockFacts(NamedTuple):
    """The scalars of each block; rows of the pool and slots count those of all layers, -1 stands for none.

    The first `old` tokens of a block have entries in the slot, in the ring's `part`. A row's `first` block loads the
    state in `source` if there is one, and stores it in `moved`. The state after a block is stored in `target` and
    `snapshot`, its entries if it `keeps` them.
    """

    first: Array
    source: Array
    moved: Array
    target: Array
    snapshot: Array
    slot: Array
    part: Array
    old: Array
    keeps: Array


class RowBlocks(NamedTuple):
    """The number of blocks, their scalars, and for each its row, and of its tokens the positions and which are new."""

    num_blocks: Int[Array, ""]
    facts: BlockFacts
    row: Int[Array, " blocks"]
    position: Int[Array, "blocks block"]
    new: Bool[Array, "blocks block"]
    token: Int[Array, "blocks block"]
    starts: Int[Array, " rows"]


def list_blocks(rows: DeltaRows, tokens: int, ring: int) -> RowBlocks:
    """List the blocks of all rows; a row has at least one."""
    num_rows = len(rows.lens)
    ends = rows.lens + rows.query_starts[1:] - rows.query_starts[:-1]
    live = jnp.arange(num_rows) < rows.num_seqs
    counts = jnp.where(live, jnp.maximum((ends - rows.folded + BLOCK - 1) // BLOCK, 1), 0)
    through = jnp.cumsum(counts).astype(jnp.int32)
    # A row has up to a block of tokens for each block of the ring before its own, and its own may begin inside a block.
    number = jnp.arange(tokens // BLOCK + (1 + ring // BLOCK) * num_rows, dtype=jnp.int32)
    row = jnp.searchsorted(through, number, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, num_rows - 1)
    starts = through - counts
    begin = rows.folded[row] + (number - starts[row]) * BLOCK
    position = begin[:, None] + jnp.arange(BLOCK, dtype=jnp.int32)
    lens, after, first = rows.lens[row], rows.folded_after[row], number == starts[row]
    writes, target = writes_target(rows)[row], rows.targets[row]

    def where(wanted: Array, value: Array) -> Array:
        return jnp.where(wanted, value, -1).astype(jnp.int32)

    facts = BlockFacts(
        first=first.astype(jnp.int32),
        source=where(rows.folded[row] > 0, rows.sources[row]),
        moved=where(first & writes & (after == begin), target),
        target=where(writes & (after == begin + BLOCK), target),
        snapshot=where((rows.snapshots[row] >= 0) & (rows.snapshot_lens[row] == begin + BLOCK), rows.snapshots[row]),
        slot=rows.slots[row],
        part=(begin // BLOCK % (ring // BLOCK)).astype(jnp.int32),
        old=jnp.clip(lens - begin, 0, BLOCK).astype(jnp.int32),
        keeps=((begin + BLOCK > after) & (ends[row] > lens)).astype(jnp.int32),
    )
    new = (position >= lens[:, None]) & (position < ends[row][:, None])
    token = jnp.clip(rows.query_starts[row][:, None] + position - lens[:, None], 0, tokens - 1)
    return RowBlocks(through[-1], facts, row, position, new, token, starts)
