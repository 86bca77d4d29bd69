"""The token budget of a step: the limits of prefill, and cuts to the size of a smaller program.

It only calculates with token counts, and knows no requests and no pages.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

# The prompt tokens that a step may have even if its decodes leave no time for them.
_LEAST_PREFILL = 16


class PrefillBudget:
    """The tokens left for prefill chunks in a step that already holds `num_decodes[i]` tokens on rank i.

    On each rank, `step_tokens` bounds the step and `prefill_tokens` the sum of its chunks. All ranks run the same
    program, so `prompt_logprob_tokens` bounds each of them as soon as any chunk computes prompt log probabilities. Of
    pooled requests, each rank may have `pooled_tokens`, if it isn't None, and at most `max_requests` chunks in all.
    """

    def __init__(
        self,
        num_decodes: Sequence[int],
        *,
        step_tokens: int,
        prefill_tokens: int,
        prompt_logprob_tokens: int,
        pooled_tokens: int | None = None,
        max_requests: int | None = None,
    ) -> None:
        self.totals = list(num_decodes)
        self.prompt_logprobs = False
        self._prefill_left = [prefill_tokens] * len(num_decodes)
        self._pooled_left = [step_tokens if pooled_tokens is None else pooled_tokens] * len(num_decodes)
        self._requests_left = [step_tokens if max_requests is None else max_requests] * len(num_decodes)
        self._step_tokens = step_tokens
        self._prompt_logprob_tokens = min(prompt_logprob_tokens, step_tokens)

    def max_chunk(self, rank: int, *, prompt_logprobs: bool, pooled: bool = False) -> int:
        """Return the length of the longest chunk that still fits."""
        limit = self._step_tokens
        if prompt_logprobs or self.prompt_logprobs:
            limit = self._prompt_logprob_tokens
            if max(self.totals) > limit:
                return 0
        left = self._prefill_left[rank] if self._requests_left[rank] else 0
        if pooled:
            left = min(left, self._pooled_left[rank])
        return max(0, min(left, limit - self.totals[rank]))

    def limit(self, rank: int, tokens: int) -> None:
        """Limit the step to `tokens` in all, whatever it holds already, but leave it a few prefill tokens."""
        self._prefill_left[rank] = min(self._prefill_left[rank], max(tokens - self.totals[rank], _LEAST_PREFILL))

    @property
    def is_out_of_pooled(self) -> bool:
        """Whether no rank may have another token of pooled requests."""
        return not any(self._pooled_left)

    def lift_pooled(self) -> None:
        """Lift the limit of pooled requests."""
        self._pooled_left = [self._step_tokens] * len(self.totals)

    def add_chunk(self, rank: int, length: int, *, prompt_logprobs: bool, pooled: bool = False) -> None:
        """Subtract a chunk from the budget."""
        self.totals[rank] += length
        self._requests_left[rank] -= 1
        self._prefill_left[rank] -= length
        if pooled:
            self._pooled_left[rank] -= length
        self.prompt_logprobs = self.prompt_logprobs or prompt_logprobs


def trim_to_bucket(totals: Sequence[int], lasts: Sequence[int], buckets: tuple[int, ...]) -> list[int]:
    """Return how many tokens to cut from the last chunk (`lasts[i]` of `totals[i]`) of each rank of a mixed step.

    A step runs in the smallest bucket that holds the fullest rank, and computes all of the bucket. If the step exceeds
    a smaller bucket by less than a quarter of the gap to the next, the excess is left for the next step. At least half
    of a chunk stays, so that the end of a prompt is not spread over many steps. Otherwise all cuts are 0.
    """
    most = max(totals)
    index = bisect.bisect_left(buckets, most)
    nothing = [0] * len(totals)
    if index == 0 or index == len(buckets) or buckets[index] == most:
        return nothing
    below, above = buckets[index - 1], buckets[index]
    cuts = [max(0, total - below) for total in totals]
    pays = all(4 * cut < above - below and 2 * cut <= last for cut, last in zip(cuts, lasts))
    return cuts if pays else nothing
