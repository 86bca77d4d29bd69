"""To which data-parallel rank a waiting request goes: where it is done soonest, reckoned in tokens to compute.

All ranks step together, each as long as the fullest. So what a request costs somewhere is what must be computed there
before its first token (prompts that are ahead of it, and what the rank's cache lacks of its own), and what one sequence
more makes every later step longer. It reads ranks and changes nothing; whether a rank has room is the planner's to see.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.engine.rank import Rank
from jaxserve.engine.request import Request

SEQUENCE_TOKENS = 64
"""Prompt tokens that one sequence more costs a rank: a row of a decode step is taken to cost a third of a prompt token,
for some two hundred steps. `benchmarks/mesh.py` compares it with others."""


def by_cost(request: Request, ranks: Sequence[Rank], pending: Sequence[int]) -> list[Rank]:
    """The ranks, the best for `request` first. `pending[i]` tokens are to be computed on rank i before its own."""
    if len(ranks) == 1:
        return list(ranks)
    fill, reusable = request.fill_tokens, request.num_reusable_tokens

    def cost(rank: Rank) -> tuple[int, int, int]:
        cached = rank.cache.match_length(request.namespace, fill, reusable)
        sequences = len(rank.prefilling) + len(rank.decoding)
        return pending[rank.index] - cached + SEQUENCE_TOKENS * sequences, -rank.num_available_pages, rank.index

    return sorted(ranks, key=cost)
