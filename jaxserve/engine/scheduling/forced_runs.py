"""Decides whether tokens that grammars force are computed together or one by one, from measured step times.

A run of forced tokens can be read like a piece of a prompt, in a step that takes longer than a decode step. Or each
token is set in place of one that would be drawn, and a decode step computes it. The tokens are the same either way.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from jaxserve.engine.speculation.step_costs import FREE_TOKENS, StepCosts
from jaxserve.step_plan import Capacity, StepPlan


class ForcedRuns:
    """Compares the programs of `capacity`, as they were measured."""

    def __init__(self, capacity: Capacity) -> None:
        self._decode_buckets = capacity.decode_buckets
        self._token_buckets = capacity.token_buckets
        self._num_ranks = capacity.num_ranks
        self._costs = StepCosts()

    def count_step(self, plan: StepPlan, seconds: float) -> None:
        """Count the duration of a step."""
        if plan.num_drafts:
            return
        if plan.num_decodes == len(plan.chunks):
            self._costs.add(self._decode_key(plan.max_rank_rows(self._num_ranks)), seconds)
        elif all(chunk.logits <= 1 for chunk in plan.chunks):
            self._costs.add(self._mixed_key(plan.max_rank_tokens(self._num_ranks)), seconds)

    def together(self, decodes: Sequence[int], runs: Sequence[Sequence[int]]) -> bool:
        """Return whether to compute runs of `runs[r]` tokens whole, in the same step as the `decodes[r]` of rank r.

        They are if that takes less time than a decode step now, and one row in such steps for each token left.
        """
        rows = list(map(len, runs))
        num_left = sum(map(sum, runs)) - sum(rows)
        decode = self._costs.of(self._decode_key(max(map(int.__add__, decodes, rows))))
        if decode is None:
            return False
        key = self._mixed_key(max(own + sum(run) for own, run in zip(decodes, runs)))
        mixed = self._costs.hoped(key)
        if mixed is None:  # grows with the root of its tokens: between reading weights and multiplying
            mixed = decode * math.sqrt(max(key[1] / FREE_TOKENS, 1.0))
        return mixed - decode < num_left * decode / (sum(decodes) + sum(rows))

    def _decode_key(self, rows: int) -> tuple[str, int]:
        return "decode", self._decode_buckets[bisect.bisect_left(self._decode_buckets, rows)]

    def _mixed_key(self, tokens: int) -> tuple[str, int]:
        return "mixed", self._token_buckets[bisect.bisect_left(self._token_buckets, tokens)]
