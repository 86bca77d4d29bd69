"""Decides whether tokens that grammars force are computed together or one by one, from measured step times.

A run of forced tokens can be read like a piece of a prompt, in a step that takes longer than a decode step. Or each
token is set in place of one that would be drawn, and a decode step computes it. The tokens are the same either way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxserve.engine.scheduling.step_times import StepTimes
from jaxserve.engine.speculation.step_costs import FREE_TOKENS


class ForcedRuns:
    """Compares programs by the times of their steps."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times

    def together(self, decodes: Sequence[int], runs: Sequence[Sequence[int]]) -> bool:
        """Return whether to compute runs of `runs[r]` tokens whole, in the same step as the `decodes[r]` of rank r.

        The alternative is one decode step now, and later one row of a decode step for each token that is left.
        """
        rows = list(map(len, runs))
        num_left = sum(map(sum, runs)) - sum(rows)
        decode = self._times.of_decodes(max(map(int.__add__, decodes, rows)))
        if decode is None:
            return False
        tokens = max(own + sum(run) for own, run in zip(decodes, runs))
        mixed = self._times.of_mixed(tokens)
        if mixed is None:  # it grows with the root of its tokens: between reading weights and multiplying
            mixed = decode * math.sqrt(max(self._times.mixed_size(tokens) / FREE_TOKENS, 1.0))
        return mixed - decode < num_left * decode / (sum(decodes) + sum(rows))
