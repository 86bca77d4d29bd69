"""The public function: a kernel on a CPU, else plain XLA."""

from __future__ import annotations

import functools

from jaxtyping import Array, Int

from pallas_kernels import dispatch
from pallas_kernels.ngram_lookup import cpu, reference
from pallas_kernels.ngram_lookup.index import NgramIndex, NgramLookup


def propose(
    index: NgramIndex,
    drafts: Int[Array, "slots max_drafts"],
    counts: Int[Array, " slots"],
    token_slots: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    tokens: Int[Array, " tokens"],
    slots: Int[Array, " rows"],
    lookup: NgramLookup,
) -> tuple[NgramIndex, Int[Array, "slots max_drafts"], Int[Array, " slots"]]:
    """Compute `reference.propose`."""
    kernel, otherwise = (functools.partial(module.propose, lookup=lookup) for module in (cpu, reference))
    proposed: tuple[NgramIndex, Array, Array] = dispatch.on_cpu(
        kernel, otherwise, index, drafts, counts, token_slots, positions, tokens, slots
    )
    return proposed
