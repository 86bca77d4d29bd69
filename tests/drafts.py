"""Drafts of any kind and length, right or wrong, for engines that speculate."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.speculation.speculation import Drafting, Speculation
from jaxserve.step_plan import Capacity, StepPlan

# The leaves of `Drafts` are the last of the state.
_KNOWN, _COUNTS, _TOKENS = -4, -6, -7


class AnyLengths(Speculation):
    """Verifies drafts of random lengths, whatever they cost."""

    def __init__(self, capacity: Capacity, rng: random.Random) -> None:
        super().__init__(capacity)
        self._random, self._capacity = rng, capacity

    def choose(self, ranks: Sequence[Sequence[Drafting]]) -> list[int] | None:
        rows = max(map(len, ranks))
        assert rows
        most = min(self._capacity.max_drafts, self._capacity.verify_buckets[-1] // rows - 1)
        if most < 1 or self._random.random() < 0.2:
            return None
        return [self._random.randint(0, most) for _ in range(16)]


class ForcedDrafts:
    """Replaces the drafts of an engine, each time before they are verified.

    `sequences` are whole sequences by request id, as they should be. A draft token is the next one of its sequence with
    the probability `rightness`, else any of `vocab`.
    """

    def __init__(self, loop: EngineLoop, vocab: int, rng: random.Random) -> None:
        self.sequences: Mapping[str, Sequence[int]] = {}
        self.rightness = 1.0
        self._random, self._vocab = rng, vocab
        executor, scheduler = loop._executor, loop._scheduler
        self._commands = executor._commands  # type: ignore[attr-defined]
        self._dispatch = executor.dispatch
        executor.dispatch = self._force  # type: ignore[method-assign]
        speculation = AnyLengths(executor.capacity, rng)
        scheduler._speculation = scheduler._planner._speculation = speculation

    def _force(self, plan: StepPlan) -> object:
        if plan.num_drafts:
            leaves = list(self._commands._state)
            tokens, counts, known = (np.array(leaves[at]) for at in (_TOKENS, _COUNTS, _KNOWN))
            for chunk in plan.chunks:
                at = chunk.rank, chunk.slot
                right = list(self.sequences.get(chunk.request_id, ()))[known[at] :]
                for place in range(tokens.shape[2]):
                    is_right = place < len(right) and self._random.random() < self.rightness
                    tokens[at][place] = right[place] if is_right else self._random.randrange(self._vocab)
                counts[at] = self._random.choice([0, 1, tokens.shape[2], tokens.shape[2]])
            for where, values in ((_TOKENS, tokens), (_COUNTS, counts)):
                leaves[where] = jax.device_put(values, leaves[where].sharding)
            self._commands._state = tuple(leaves)
        return self._dispatch(plan)
