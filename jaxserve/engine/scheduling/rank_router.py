"""To which data-parallel rank a waiting request goes: where it is done soonest, reckoned in tokens to compute.

All ranks step together, each as long as the fullest. So what a request costs somewhere is what must be computed there
before its first token (prompts that are ahead of it, and what the rank's cache lacks of its own), and what one sequence
more makes every later step longer. It reads ranks and changes nothing; whether a rank has room is the planner's to see.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.engine.scheduling.rank import Rank
from jaxserve.engine.scheduling.request import Request

SEQUENCE_TOKENS = 64
"""Prompt tokens that one sequence more costs a rank: a row of a decode step is taken to cost a third of a prompt token,
for some two hundred steps. `benchmarks/mesh.py` compares it with others."""

CACHED_WEIGHT = 4
"""What a cached token of a prompt is worth, in tokens to compute before it: it saves the request its time, others there
theirs, and the room that a second copy would take. `benchmarks/mesh.py` and `replicas.py` compare it with others."""

CROWDED_SHARE = 0.25
"""Who has more requests than the emptiest, by this share of its slots, comes after those who have not: however long a
prefix is that all share, they don't all sit in one place."""


def by_cost(request: Request, ranks: Sequence[Rank], pending: Sequence[int]) -> list[Rank]:
    """The ranks, the best for `request` first. `pending[i]` tokens are to be computed on rank i before its own."""
    if len(ranks) == 1:
        return list(ranks)
    fill, reusable = request.fill_tokens, request.num_reusable_tokens
    most_free = max(rank.num_free_slots for rank in ranks)

    def cost(rank: Rank) -> tuple[bool, int, int, int]:
        cached = rank.cache.match_length(request.namespace, fill, reusable)
        sequences = len(rank.prefilling) + len(rank.decoding)
        return (
            most_free - rank.num_free_slots > CROWDED_SHARE * rank.num_slots,
            pending[rank.index] - CACHED_WEIGHT * cached + SEQUENCE_TOKENS * sequences,
            -rank.num_available_pages,
            rank.index,
        )

    return sorted(ranks, key=cost)
