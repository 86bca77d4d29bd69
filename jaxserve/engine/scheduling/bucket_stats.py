"""Counts which programs the steps ran in, and how much of them was padding.

The counts are for the log and the metrics, and come from plans only: all ranks run the smallest program that holds the
fullest rank.
"""

from __future__ import annotations

from collections import Counter

from jaxserve.step_plan import Capacity, StepKind, StepPlan


class BucketStats:
    """Totals since the start, by kind of step: rows of decodes, else tokens.

    `used` of the `sizes` of the programs were used. `last_bucket` is the size of the last program without prompts.
    """

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self.last_bucket = 0
        self.coarse_decode_steps = 0
        self.decode_steps_by_rows: Counter[int] = Counter()
        self.used: Counter[StepKind] = Counter()
        self.sizes: Counter[StepKind] = Counter()

    def count(self, plan: StepPlan) -> None:
        """Count a planned step."""
        kind, ranks = plan.kind, self._capacity.num_ranks
        most = plan.size(ranks)
        size = self._capacity.bucket(kind, most)
        self.sizes[kind] += size * ranks
        if kind == "decode":
            self.used[kind] += plan.num_decodes
            self.coarse_decode_steps += most > self._capacity.fine_decode_rows
            self.decode_steps_by_rows[most] += 1
        else:
            self.used[kind] += most if ranks == 1 else sum(chunk.length for chunk in plan.chunks)
        if kind in ("decode", "verify"):
            self.last_bucket = size
