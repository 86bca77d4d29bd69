"""How many tokens each expert has computed, from counters of the devices that start again at 2**32."""

from __future__ import annotations

import jax
import numpy as np

# A step has fewer than 2**19 tokens, so that no counter passes 2**32 unseen.
_STEPS_BETWEEN_READINGS = 2**13


class ExpertTokens:
    """The totals of a deployment; a dense model has none."""

    def __init__(self) -> None:
        self._latest: jax.Array | None = None
        self._num_unread = 0
        self._read = np.zeros((), np.uint32)
        self._totals = np.zeros((0, 0), np.int64)

    def record(self, counters: jax.Array | None) -> None:
        """Keep the counters of a finished step, `[ranks, layers, experts]`, which rarely are fetched."""
        self._latest = counters
        self._num_unread += 1
        if self._num_unread == _STEPS_BETWEEN_READINGS:
            self.read()

    def read(self) -> tuple[tuple[int, ...], ...]:
        """Return the totals of all ranks, by layer and expert, as of the last recorded step."""
        self._num_unread = 0
        if self._latest is not None:
            counters = np.asarray(self._latest)
            added = counters - self._read  # uint32, so that it is right across an overflow
            self._read = counters
            self._totals = added.sum(axis=0, dtype=np.int64) + (self._totals if self._totals.size else 0)
        return tuple(map(tuple, self._totals.tolist()))
