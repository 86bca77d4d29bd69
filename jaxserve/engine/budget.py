"""How many tokens a step may hold: the limits of prefill, and the sizes of the programs.

Pure arithmetic on token counts; it knows no requests and no pages.
"""

from __future__ import annotations

import bisect


class PrefillBudget:
    """What prefill chunks may still take in a step that already holds `num_decodes` tokens.

    `step_tokens` bounds the step, `prefill_tokens` its chunks together, and `prompt_logprob_tokens` the step as soon as
    one chunk computes log probabilities of its prompt.
    """

    def __init__(self, num_decodes: int, *, step_tokens: int, prefill_tokens: int, prompt_logprob_tokens: int) -> None:
        self.total = num_decodes
        self.prompt_logprobs = False
        self._prefill_left = prefill_tokens
        self._step_tokens = step_tokens
        self._prompt_logprob_tokens = min(prompt_logprob_tokens, step_tokens)

    def offer(self, *, prompt_logprobs: bool) -> int:
        """The longest chunk that still fits."""
        limit = self._prompt_logprob_tokens if prompt_logprobs or self.prompt_logprobs else self._step_tokens
        return max(0, min(self._prefill_left, limit - self.total))

    def take(self, length: int, *, prompt_logprobs: bool) -> None:
        """Count a chunk in."""
        self.total += length
        self._prefill_left -= length
        self.prompt_logprobs = self.prompt_logprobs or prompt_logprobs


def trim_to_bucket(total: int, last: int, buckets: tuple[int, ...]) -> int:
    """How many tokens to cut from the last chunk (`last` of `total`) of a mixed step: 0 unless that saves a program.

    A step runs in the smallest bucket that holds it and pays for all of it. When it lies above a bucket by less than a
    quarter of the gap to the next, the excess waits for the next step. At least half of the chunk stays, so a prompt's
    tail is never dragged over many steps.
    """
    index = bisect.bisect_left(buckets, total)
    if index == 0 or index == len(buckets) or buckets[index] == total:
        return 0
    below, above = buckets[index - 1], buckets[index]
    excess = total - below
    return excess if 4 * excess < above - below and 2 * excess <= last else 0
