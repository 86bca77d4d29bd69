"""Drafts of any kind and length, right or wrong, for engines that speculate."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.speculation.speculation import DraftedRequest, Speculation
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.step import StepOutput
from jaxserve.step_plan import Capacity, StepPlan

# The draft tokens among the leaves of the state, of which those of `Drafts` are the last; after them come their counts.
_TOKENS = {"ngram": -7, "draft": -5}


class AnyLengths(Speculation):
    """Verifies drafts of random lengths, whatever they cost."""

    def __init__(self, capacity: Capacity, rng: random.Random) -> None:
        super().__init__(capacity)
        self._random, self._capacity = rng, capacity
        self.paused = False

    def choose(self, ranks: Sequence[Sequence[DraftedRequest]]) -> list[int] | None:
        rows = max(map(len, ranks))
        assert rows
        most = min(self._capacity.max_drafts, self._capacity.verify_buckets[-1] // rows - 1)
        if most < 1 or self.paused or self._random.random() < 0.2:
            return None
        return [self._random.randint(0, most) for _ in range(16)]


class ForcedDrafts:
    """Replaces the drafts of an engine, each time before they are verified.

    `sequences` are whole sequences by request id, as they should be. A draft token is the next one of its sequence with
    the probability `rightness`, else any of `vocab`.
    """

    def __init__(self, loop: EngineLoop, vocab: int, rng: random.Random, method: str = "ngram") -> None:
        self.sequences: Mapping[str, Sequence[int]] = {}
        self.rightness = 1.0
        self._random, self._vocab, self._tokens = rng, vocab, _TOKENS[method]
        self._plan: StepPlan | None = None
        executor = loop._executor
        self._commands = executor._commands  # type: ignore[attr-defined]
        self._dispatch, self._run = executor.dispatch, self._commands.call
        executor.dispatch = self._remember  # type: ignore[method-assign]
        self._commands.call = self._force
        draft_any_lengths(loop, rng)

    def _remember(self, plan: StepPlan) -> object:
        self._plan = plan
        return self._dispatch(plan)

    def _force(self, key: ProgramKey, packed: np.ndarray, *rows: Any) -> StepOutput:
        if key.kind == "verify":
            leaves = list(self._commands._state)
            by_slot = [leaf for leaf in leaves if leaf.ndim == 2 and leaf.dtype == np.int32]
            tokens, counts, computed = (np.array(x) for x in (*leaves[self._tokens :][:2], by_slot[1]))
            assert self._plan is not None
            for chunk in self._plan.chunks:
                at = chunk.rank, chunk.slot
                right = list(self.sequences.get(chunk.request_id, ()))[computed[at] + 1 :]
                for place in range(tokens.shape[2]):
                    is_right = place < len(right) and self._random.random() < self.rightness
                    tokens[at][place] = right[place] if is_right else self._random.randrange(self._vocab)
                counts[at] = self._random.choice([0, 1, tokens.shape[2], tokens.shape[2]])
            for where, values in ((self._tokens, tokens), (self._tokens + 1, counts)):
                leaves[where] = jax.device_put(values, leaves[where].sharding)
            self._commands._state = tuple(leaves)
        return self._run(key, packed, *rows)


def draft_any_lengths(loop: EngineLoop, rng: random.Random) -> AnyLengths:
    """Let an engine verify drafts of random lengths; return what chooses them."""
    scheduler, lengths = loop._scheduler, AnyLengths(loop._executor.capacity, rng)
    scheduler._speculation = scheduler._planner._speculation = lengths
    return lengths
