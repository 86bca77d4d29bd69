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
        """Count the duration of a step."""
        kind, ranks = plan.kind, self._capacity.num_ranks
        if kind in ("decode", "verify") and not plan.draft_reads:
            self._costs.add(("alone", self._capacity.bucket("decode", plan.max_rank_rows(ranks))), seconds)
        if kind in ("decode", "mixed") and not plan.num_drafts:
            self._costs.add((kind, self._capacity.bucket(kind, plan.size(ranks))), seconds)

    def of_decodes(self, rows: int) -> float | None:
        """Return the seconds of a step of decodes, or None if none was measured."""
        return self._costs.of(("decode", self._capacity.bucket("decode", rows)))

    def of_step(self, rows: int) -> float | None:
        """Return the seconds of a step without prompts, with or without drafts, of this many rows.

        Before one was measured, or for more rows than decode at once (runs of forced tokens), it is taken to be one
        with prompts of as many tokens.
        """
        found = None
        if rows <= self._capacity.decode_buckets[-1]:
            found = self._costs.of(("alone", self._capacity.bucket("decode", rows)))
        return self.guess_mixed(rows) if found is None else found

    def mixed_size(self, tokens: int) -> int:
        """Return the size of the program that holds a step with prompts of this many tokens in all."""
        return self._capacity.bucket("mixed", min(tokens, self._capacity.token_buckets[-1]))

    def of_mixed(self, tokens: int) -> float | None:
        """Return the seconds of a step with prompts, less if it was measured long ago, or None if it never was."""
        return self._costs.hoped(("mixed", self.mixed_size(tokens)))

    def guess_mixed(self, tokens: int) -> float | None:
        """Return the seconds of a step with prompts of this many tokens, or None if none with prompts was measured.

        A program that was never measured is taken to need as long for each token as the largest one that was.
        """
        known, size = self.of_mixed(tokens), self.mixed_size(tokens)
        if known is not None:
            return known
        for other in reversed(self._capacity.buckets("mixed")):
            if (seconds := self.of_mixed(other)) is not None:
                return seconds * size / other
        return None

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
