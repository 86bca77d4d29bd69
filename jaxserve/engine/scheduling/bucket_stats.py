"""Counts which programs the steps ran in, and how much of them was padding.

The counts are for the log and the metrics, and come from plans only: all ranks run the smallest program that holds the
fullest rank.
"""

from __future__ import annotations

import bisect
from collections import Counter

from jaxserve.step_plan import Capacity, StepPlan


class BucketStats:
    """Totals since the start; `last_bucket` is the number of rows of the last decode program."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self.last_bucket = 0
        self.decode_steps = 0
        self.coarse_decode_steps = 0
        self.decode_rows = 0
        self.decode_steps_by_rows: Counter[int] = Counter()
        self.decode_bucket_rows = 0
        self.mixed_tokens = 0
        self.mixed_bucket_tokens = 0

    def count(self, plan: StepPlan) -> None:
        """Count a planned step."""
        ranks = self._capacity.num_ranks
        if plan.num_decodes == len(plan.chunks):
            rows = plan.max_rank_rows(ranks)
            self.last_bucket = _smallest(self._capacity.decode_buckets, rows)
            self.decode_steps += 1
            self.coarse_decode_steps += rows > self._capacity.fine_decode_rows
            self.decode_rows += plan.num_decodes
            self.decode_steps_by_rows[rows] += 1
            self.decode_bucket_rows += self.last_bucket * ranks
        elif all(chunk.logits <= 1 for chunk in plan.chunks):
            most = plan.max_rank_tokens(ranks)
            self.mixed_tokens += most if ranks == 1 else sum(chunk.length for chunk in plan.chunks)
            self.mixed_bucket_tokens += _smallest(self._capacity.token_buckets, most) * ranks


def _smallest(buckets: tuple[int, ...], size: int) -> int:
    return buckets[min(bisect.bisect_left(buckets, size), len(buckets) - 1)]
