"""Counts the tokens that each expert has computed, from counters of the devices that start again at 2**32."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

_OVERFLOW = 2**32


class ExpertTokens:
    """The totals of the `layers` that have experts, `experts` each.

    A step has at most `step_tokens` tokens over all ranks.
    """

    def __init__(self, layers: Sequence[int] = (), experts: int = 0, step_tokens: int = 1) -> None:
        self._layers = layers
        self._latest: jax.Array | None = None
        self._num_unread = 0
        self._most_unread = max(1, (_OVERFLOW - 1) // step_tokens)
        self._read = np.zeros((), np.uint32)
        self._totals = np.zeros((len(layers), experts), np.int64)

    def record(self, counters: jax.Array | None) -> None:
        """Keep the counters of a finished step, `[ranks, mixtures, experts]`; they are fetched before they overflow."""
        self._latest = counters
        self._num_unread += 1
        if self._num_unread == self._most_unread:
            self.read()

    def read(self) -> tuple[tuple[int, ...], ...]:
        """Return the totals of all ranks by layer, up to the last mixture, and expert, as of the last recorded step.

        A dense layer has ().
        """
        self._num_unread = 0
        if self._latest is not None:
            counters = np.asarray(self._latest)
            added = counters - self._read  # uint32, so that it is right across an overflow
            self._read = counters
            self._totals += added.sum(axis=0, dtype=np.int64)
        rows = dict(zip(self._layers, map(tuple, self._totals.tolist()), strict=True))
        return tuple(rows.get(layer, ()) for layer in range(max(rows, default=-1) + 1))
