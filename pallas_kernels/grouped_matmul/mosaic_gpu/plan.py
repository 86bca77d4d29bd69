"""Sizes of the tiles of a grouped product, decided by its shape alone: how many rows an expert has isn't known then."""

from __future__ import annotations

import dataclasses

from pallas_kernels.quantized_matmul.mosaic_gpu.unpack import TILE_ROWS
from pallas_kernels.quantized_matmul.scheme import Scheme

# Tokens of a tile. The registers of four warpgroups (few tokens) or two (most) must hold a tile's sums. Weights with
# groups also need registers for the sums of a part of a block, and those with small groups for several parts.
_FEWEST_TOKENS, _FEW_TOKENS, _FEW_TOKENS_OF_PARTS, _FEW_TOKENS_OF_SMALL_PARTS = 8, 32, 16, 8
_MOST_TOKENS, _MOST_TOKENS_OF_PARTS, _MOST_TOKENS_OF_SMALL_PARTS = 128, 80, 48
_BLOCK, _QUANTIZED_BLOCK = 64, 128
_MOST_STAGES = 12
_MUCH_LESS = 0.8
# The part of a program's 227 KiB of shared memory that blocks may take; factors and barriers take the rest.
_SHARED_BYTES = 216 * 1024


@dataclasses.dataclass(frozen=True)
class GroupedPlan:
    """A tile has `tokens` rows of one expert, and 64 outputs for each of `warpgroups`: with a gate, half of them of the
    gate matrix, half of the up matrix. It is read in `blocks` blocks of `block` inputs; `stages` blocks are in flight.

    `output_tiles` cover the outputs of an expert. `programs`, at most one a core, take tiles in turn.
    """

    tokens: int
    warpgroups: int
    block: int
    blocks: int
    output_tiles: int
    stages: int
    programs: int


def make_plan(
    results: int,
    in_dim: int,
    rows: tuple[int, int],
    experts: int,
    cores: int,
    scheme: Scheme | None,
    *,
    in_place: bool,
    gated: bool,
    out_bytes: int,
) -> GroupedPlan:
    """Return the plan of a product whose rows have `results` numbers of `out_bytes`.

    `rows` are the number that probably have a pair, and the number that may have one.

    Tiles have as many rows as two average experts: so most experts' weights are read once. Four warpgroups multiply by
    few rows, unless the busiest core would have much less to do with two, as there are more tiles then. Many rows leave
    registers for two.
    """
    likely, all_rows = rows
    few, most = _FEW_TOKENS, _MOST_TOKENS
    if scheme is not None and scheme.activations is None:
        small = scheme.group is not None and scheme.group < _QUANTIZED_BLOCK
        few = _FEW_TOKENS_OF_SMALL_PARTS if small else _FEW_TOKENS_OF_PARTS
        most = _MOST_TOKENS if in_place else _MOST_TOKENS_OF_SMALL_PARTS if small else _MOST_TOKENS_OF_PARTS
    tokens = min(most, max(_FEWEST_TOKENS, 1 << (-(-2 * likely // experts) - 1).bit_length()))
    most_row_tiles = min(all_rows, experts + all_rows // tokens)
    likely_row_tiles = max(round(experts * (1 - (1 - 1 / experts) ** likely)), likely // tokens)

    def output_tiles(warpgroups: int) -> int:
        return -(-results // (warpgroups * TILE_ROWS // (2 if gated else 1)))

    def busiest(warpgroups: int) -> int:
        return -(-output_tiles(warpgroups) * likely_row_tiles // cores) * warpgroups

    warpgroups = 4 if tokens <= few and busiest(2) > _MUCH_LESS * busiest(4) else 2
    block = _BLOCK if scheme is None else _QUANTIZED_BLOCK
    bits, x_bytes = (16, 2) if scheme is None else (scheme.bits, 2 if scheme.activations is None else 1)
    outputs = warpgroups * TILE_ROWS
    # Shared memory also holds whole sums on their way out, and with a gate the sums of up.
    written = tokens * outputs * (2 + out_bytes // 2 if gated else out_bytes)
    return GroupedPlan(
        tokens=tokens,
        warpgroups=warpgroups,
        block=block,
        blocks=-(-in_dim // block),
        output_tiles=output_tiles(warpgroups),
        stages=min(_MOST_STAGES, (_SHARED_BYTES - written) // (block * (outputs * bits // 8 + tokens * x_bytes))),
        programs=min(cores, output_tiles(warpgroups) * most_row_tiles),
    )
