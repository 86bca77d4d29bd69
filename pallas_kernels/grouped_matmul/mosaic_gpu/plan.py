"""Sizes of the tiles of a grouped product, decided by its shape alone: how many rows an expert has isn't known then."""

from __future__ import annotations

import dataclasses

from pallas_kernels.quantized_matmul.mosaic_gpu.unpack import TILE_ROWS
from pallas_kernels.quantized_matmul.scheme import Scheme

_FEWEST_TOKENS, _SHARED_CORE_TOKENS, _MOST_TOKENS = 8, 16, 128
_MOST_STAGES = 8
_WARPGROUPS = 2
# Of the 228 KiB of shared memory that a core has, of which it keeps one for each program; barriers take the rest.
_SHARED_BYTES = 216 * 1024


@dataclasses.dataclass(frozen=True)
class Plan:
    """A tile has `tokens` rows of one expert, and 64 outputs for each of `warpgroups`; with a gate, half of these belong
    to the gate matrix and half to the up matrix. It is read in `blocks` of `block` inputs, `stages` at a time.

    `programs` take tiles in turn, `programs_a_core` of them on a core. `output_tiles` cover the outputs of an expert.
    """

    tokens: int
    warpgroups: int
    block: int
    blocks: int
    output_tiles: int
    stages: int
    programs: int
    programs_a_core: int


def make_plan(
    results: int,
    in_dim: int,
    rows: int,
    experts: int,
    cores: int,
    scheme: Scheme | None,
    *,
    gated: bool,
    out_bytes: int,
) -> Plan:
    """Return the plan of a product of `rows` in all, whose rows have `results` numbers of `out_bytes`.

    Tiles have as many rows as two average experts: so most experts' weights are read once.
    """
    small = scheme is not None and scheme.group is not None and scheme.group < 128
    most = _MOST_TOKENS // 2 if small else _MOST_TOKENS
    tokens = min(most, max(_FEWEST_TOKENS, 1 << (-(-2 * rows // experts) - 1).bit_length()))
    tile = _WARPGROUPS * TILE_ROWS
    block = 64 if scheme is None else 128
    output_tiles = -(-results // (tile // 2 if gated else tile))
    bits, x_bytes = (16, 2) if scheme is None else (scheme.bits, 2 if scheme.activations is None else 1)
    stage = block * (tile * bits // 8 + tokens * x_bytes)
    programs_a_core = 2 if tokens <= _SHARED_CORE_TOKENS else 1
    # The sums of up, and whole sums on their way out.
    room = _SHARED_BYTES // programs_a_core - tokens * tile * (2 + out_bytes // 2 if gated else out_bytes)
    most_tiles = output_tiles * min(rows, experts + rows // tokens)
    return Plan(
        tokens=tokens,
        warpgroups=_WARPGROUPS,
        block=block,
        blocks=-(-in_dim // block),
        output_tiles=output_tiles,
        stages=min(_MOST_STAGES, room // stage),
        programs=min(cores * programs_a_core, most_tiles),
        programs_a_core=programs_a_core,
    )
