"""How a product is divided among the cores of a GPU, decided by its shape alone."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.quantized_matmul.mosaic_gpu.unpack import TILE_ROWS
from pallas_kernels.quantized_matmul.scheme import Scheme

BLOCK = 128
"""Inputs that are copied at a time."""

_FEWEST_TOKENS, _SHARED_TOKENS, _MOST_TOKENS = 8, 64, 128
_MOST_STAGES = 8
# The part of a program's 227 KiB of shared memory that blocks may take; factors and barriers take the rest.
_SHARED_BYTES = 216 * 1024
# Whole sums leave through shared memory in bfloat16.
_ROUNDED_BYTES = 2


@dataclasses.dataclass(frozen=True)
class ProductPlan:
    """Tiles of `outputs` and `tokens`, each of `blocks` blocks of inputs, divided evenly among `cores`.

    Blocks are numbered tile by tile, and tiles of the same outputs follow each other. Each core takes the blocks that
    follow those of the core before. If not `whole`, a tile may be divided: then several cores have a part of its sums.
    A core is here a cluster of `cluster` cores that divide its outputs. `stages` blocks are in flight.
    """

    outputs: int
    tokens: int
    blocks: int
    output_tiles: int
    token_tiles: int
    cores: int
    whole: bool
    cluster: int
    stages: int

    @property
    def tiles(self) -> int:
        return self.output_tiles * self.token_tiles

    def first_block(self, core: jax.Array) -> jax.Array:
        """Return the first block of a core."""
        if self.whole:
            return lax.div(core * self.tiles, jnp.int32(self.cores)) * self.blocks
        return lax.div(core * (self.tiles * self.blocks), jnp.int32(self.cores))

    def first_core(self, tile: jax.Array) -> jax.Array:
        """Return the core that has the first block of a tile; it has the tile's first part."""
        if self.whole:
            return lax.div((tile + 1) * self.cores - 1, jnp.int32(self.tiles))
        return lax.div((tile * self.blocks + 1) * self.cores - 1, jnp.int32(self.tiles * self.blocks))

    def place(self, block: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the first output and the first token of a block's tile, and its number in the tile."""
        tile = lax.div(block, jnp.int32(self.blocks))
        output = lax.div(tile, jnp.int32(self.token_tiles))
        token = tile - output * self.token_tiles
        return output * self.outputs, token * self.tokens, block - tile * self.blocks

    def tiles_until(self, end: jax.Array) -> jax.Array:
        """Return the number of tiles that have blocks before `end`."""
        return lax.div(end + self.blocks - 1, jnp.int32(self.blocks))

    @property
    def part_counts(self) -> np.ndarray:
        """The number of parts that each tile is divided into."""
        if self.whole:
            return np.ones(self.tiles, np.int64)
        first, total = np.arange(self.tiles) * self.blocks, self.tiles * self.blocks
        last = first + self.blocks - 1
        return ((last + 1) * self.cores - 1) // total - ((first + 1) * self.cores - 1) // total + 1

    @property
    def parts(self) -> int:
        """The most parts of a tile."""
        return int(self.part_counts.max())


def rule_sizes(out_dim: int, rows: int, scheme: Scheme) -> dict[str, int]:
    """Return block sizes by rule: few rows take as many outputs as possible, as each tile of outputs reads all inputs.

    Many rows take as many tokens as registers hold sums for, besides the sums of a group; several groups of a block are
    summed at the same time. There two programs share the inputs that they read, if outputs allow it.
    """
    small = scheme.group is not None and scheme.group < BLOCK
    tokens = min(_MOST_TOKENS // 2 if small else _MOST_TOKENS, max(_FEWEST_TOKENS, 1 << (rows - 1).bit_length()))
    most = (_MOST_TOKENS if small else 2 * _MOST_TOKENS) // tokens
    warpgroups = next(n for n in (4, 3, 2, 1) if out_dim % (n * TILE_ROWS) == 0 and n <= most)
    cluster = 2 if tokens >= _SHARED_TOKENS and out_dim % (2 * warpgroups * TILE_ROWS) == 0 else 1
    return {"tokens": tokens, "warpgroups": warpgroups, "cluster": cluster, "stages": _MOST_STAGES}


def make_plan(out_dim: int, in_dim: int, rows: int, cores: int, scheme: Scheme, sizes: dict[str, int]) -> ProductPlan:
    """Return the plan of a product with these block sizes, and as many `stages` as shared memory holds.

    Tiles stay whole where dividing them would move more bytes.
    """
    tokens, cluster, outputs = sizes["tokens"], sizes["cluster"], sizes["warpgroups"] * TILE_ROWS
    room = _SHARED_BYTES - _ROUNDED_BYTES * outputs * tokens
    divided = ProductPlan(
        outputs=outputs * cluster,
        tokens=tokens,
        blocks=in_dim // BLOCK,
        output_tiles=out_dim // (outputs * cluster),
        token_tiles=-(-rows // tokens),
        cores=max(1, cores // cluster),
        whole=False,
        cluster=cluster,
        stages=min(sizes["stages"], room // _block_bytes(outputs, tokens, scheme)),
    )
    divided = dataclasses.replace(divided, cores=min(divided.cores, divided.tiles * divided.blocks))
    whole = dataclasses.replace(divided, cores=min(divided.cores, divided.tiles), whole=True)
    return min(whole, divided, key=lambda plan: _core_bytes(plan, scheme))


def _core_bytes(plan: ProductPlan, scheme: Scheme) -> float:
    """Return the bytes that the busiest core reads, and its share of those written and read again to add parts."""
    units = plan.tiles if plan.whole else plan.tiles * plan.blocks
    blocks = -(-units // plan.cores) * (plan.blocks if plan.whole else 1)
    parts = 0 if plan.parts == 1 else 2 * 4 * plan.parts * plan.tiles * plan.outputs * plan.tokens
    return blocks * _block_bytes(plan.outputs, plan.tokens, scheme) + parts / plan.cores


def _block_bytes(outputs: int, tokens: int, scheme: Scheme) -> int:
    return BLOCK * (outputs * scheme.bits // 8 + tokens * (2 if scheme.activations is None else 1))
