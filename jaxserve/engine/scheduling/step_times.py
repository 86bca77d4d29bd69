"""The measured times of steps: those of decodes by their rows, those with prompts by their tokens."""

from __future__ import annotations

from jaxserve.engine.speculation.step_costs import StepCosts
from jaxserve.step_plan import Capacity, StepPlan

# The most tokens of a step with a prompt beside decodes before any such step was measured.
_FIRST_TOKENS = 128


class StepTimes:
    """Times of the programs of `capacity`."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._costs = StepCosts()

    def count_step(self, plan: StepPlan, seconds: float) -> None:
        """Count the duration of a step without drafts."""
        kind = plan.kind
        if kind in ("decode", "mixed") and not plan.num_drafts:
            self._costs.add((kind, self._capacity.bucket(kind, plan.size(self._capacity.num_ranks))), seconds)

    def of_decodes(self, rows: int) -> float | None:
        """Return the seconds of a step of decodes, or None if none was measured."""
        return self._costs.of(("decode", self._capacity.bucket("decode", rows)))

    def of_step(self, tokens: int) -> float | None:
        """Return the seconds of a step without prompts; those of one with prompts if only such were measured, or if it
        has runs of forced tokens."""
        found = self.of_decodes(tokens) if tokens <= self._capacity.decode_buckets[-1] else None
        return self.of_mixed(tokens) if found is None else found

    def mixed_size(self, tokens: int) -> int:
        """Return the size of the program that holds a step with prompts of this many tokens in all."""
        return self._capacity.bucket("mixed", min(tokens, self._capacity.token_buckets[-1]))

    def of_mixed(self, tokens: int) -> float | None:
        """Return the seconds of a step with prompts, less if it was measured long ago, or None if it never was."""
        return self._costs.hoped(("mixed", self.mixed_size(tokens)))

    def most_tokens(self, seconds: float) -> int:
        """Return the most tokens of a step with prompts that takes at most `seconds`: at least the smallest program's.

        A program that was never measured is taken to need as long for each token as the next smaller one.
        """
        sizes = self._capacity.buckets("mixed")
        most, known = sizes[0], None
        for size in sizes:
            measured = self.of_mixed(size)
            if measured is not None:
                known = measured / size
            if size > _FIRST_TOKENS if known is None else known * size > seconds:
                break
            most = size
        return most
