"""Orders the data-parallel ranks for a waiting request: the one that finishes it soonest first.

The unit of cost is a token to compute. All ranks step together, so each step lasts as long as the fullest rank needs.
The cost of a rank is the prompt tokens to compute there before the request's first token (prompts ahead of it, and the
part of its own that the rank has not cached), plus the slowdown of later steps by each sequence that runs there. This
module reads ranks and changes nothing; the planner checks whether a rank has room.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.engine.scheduling.rank import Rank
from jaxserve.engine.scheduling.request import Request

SEQUENCE_TOKENS = 64
"""The cost of one running sequence, in prompt tokens: assumes that a row of a decode step costs a third of a prompt
token, for about two hundred steps. `benchmarks/mesh.py` compares it with other values."""

CACHED_WEIGHT = 4
"""The value of one cached prompt token, in tokens to compute: it saves time for this request and for others on the
rank, and the memory of a second copy. `benchmarks/mesh.py` and `replicas.py` compare it with other values."""

CROWDED_SHARE = 0.25
"""A rank is crowded if it runs more requests than the emptiest by this share of its slots. Crowded ranks come last,
so that requests that all share a prefix, however long, don't all go to one rank."""


def rank_by_cost(request: Request, ranks: Sequence[Rank], pending: Sequence[int]) -> list[Rank]:
    """Return the ranks, the best for `request` first. `pending[i]` other tokens come first on rank i."""
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
