"""Bounds the time that pooled requests take while others are open: how many of their tokens the next step may have."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.engine.scheduling.step_times import StepTimes

# The fewest tokens of pooled requests that a step computes: in smaller parts, all of them would take longer.
_PART = 128


class PooledShare:
    """Lets pooled requests have `share` of the time, by the measured `times` of steps.

    Each step of the others earns time for them; a step that also has tokens of pooled requests spends what it is longer
    by. No more is saved up than a part of a prompt takes. A step has at most `most_tokens` tokens of pooled requests.
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

    def tokens(self, num_decodes: Sequence[int], waiting: int) -> int:
        """Return how many of the `waiting` tokens of pooled requests the next step may compute on each rank: as many
        as fill its program, or 0 until there is time for a part."""
        decodes = max(num_decodes)
        alone = self._times.of_step(decodes)
        if alone is None:
            return 0
        size = self._times.mixed_size(max(decodes + 1, min(waiting, _PART)))
        if self._cost(decodes, size - decodes) > self._seconds:
            return 0
        if waiting > size - decodes:
            size = max(size, self._times.most_tokens(self._seconds + alone))
        return min(size - decodes, self._most_tokens)

    def count(self, num_decodes: Sequence[int], tokens: int, pooled: int) -> None:
        """Count a step with `num_decodes[i]` decodes on rank i, at most `tokens` tokens of other prompts on a rank, and
        `pooled` of pooled requests."""
        assert self._ratio is not None
        decodes = max(num_decodes)
        others = self._times.guess_mixed(decodes + tokens) if tokens else self._times.of_step(decodes)
        earned = self._ratio * (others or 0.0) if decodes or tokens else 0.0
        part = self._times.mixed_size(decodes + _PART) - decodes
        self._seconds = min(self._seconds + earned, max(self._cost(decodes, part), earned))
        if pooled:
            self._seconds -= self._cost(decodes, pooled)

    def _cost(self, decodes: int, tokens: int) -> float:
        """Return the seconds by which `tokens` tokens lengthen a step of decodes; 0 if none was measured yet."""
        together, alone = self._times.guess_mixed(decodes + tokens), self._times.of_step(decodes)
        return 0.0 if together is None or alone is None else max(together - alone, 0.0)
