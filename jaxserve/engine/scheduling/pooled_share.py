"""Bounds the time that pooled requests take while others decode: how many of their tokens the next step may compute."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.engine.scheduling.step_times import StepTimes

# A prompt is computed in parts of at least this many tokens: smaller ones take longer in all.
_LEAST_TOKENS = 128


class PooledShare:
    """Lets pooled requests have `share` of the time, by the measured `times` of steps.

    Each step of the others earns time for them; a step that also has tokens of pooled requests spends what it is longer
    by. The time saved up is at most that of `most_tokens` tokens.
    """

    def __init__(self, times: StepTimes, share: float, most_tokens: int) -> None:
        self._times = times
        self._ratio = share / (1.0 - share) if share < 1.0 else None
        self._most_tokens = most_tokens
        self._seconds = 0.0

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit."""
        return self._ratio is not None

    def earn(self, num_decodes: Sequence[int]) -> None:
        """Count a step with `num_decodes[i]` decodes on rank i."""
        assert self._ratio is not None
        decodes = max(num_decodes)
        alone = self._times.of_step(decodes)
        most = self._cost(decodes, self._most_tokens)
        if alone is not None:
            self._seconds += self._ratio * alone
        if most is not None:
            self._seconds = min(self._seconds, most)

    def tokens(self, num_decodes: Sequence[int], waiting: int) -> int:
        """Return how many of the `waiting` tokens of the first pooled request, or of others after it, the next step may
        compute on each rank; 0 until there is time for a part of it.

        Until such a step was measured, it may have one part.
        """
        decodes, least = max(num_decodes), min(waiting, _LEAST_TOKENS)
        cost = self._cost(decodes, least)
        if cost is None:
            return least
        if cost > self._seconds:
            return 0
        most = self._times.most_tokens(self._seconds + (self._times.of_step(decodes) or 0.0)) - decodes
        return min(max(most, least), self._most_tokens)

    def spend(self, num_decodes: Sequence[int], tokens: int) -> None:
        """Subtract the time for `tokens` tokens beside the decodes of a step."""
        self._seconds -= self._cost(max(num_decodes), tokens) or 0.0

    def _cost(self, decodes: int, tokens: int) -> float | None:
        """Return the seconds by which `tokens` tokens lengthen a step of decodes, None if that was never measured."""
        together, alone = self._times.of_mixed(decodes + tokens), self._times.of_step(decodes)
        return None if together is None or alone is None else max(together - alone, 0.0)
