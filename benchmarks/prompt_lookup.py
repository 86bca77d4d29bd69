"""Simulates prompt lookup on answers that are known: how many draft tokens of a step would have been accepted.

The draft of a step follows the latest earlier place of the longest n-gram that ends the text so far. The figures are a
bound for greedy decoding, as cost is no limit: every step verifies the draft it finds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class LookupFigures:
    """Sums over the decode steps of answers. Of the `accepted` draft tokens, `accepted_from_answer` followed a place in
    the answer itself instead of the prompt."""

    steps: int = 0
    drafts: int = 0
    accepted: int = 0
    accepted_from_answer: int = 0

    def __add__(self, other: LookupFigures) -> LookupFigures:
        return LookupFigures(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))

    @property
    def accepted_per_step(self) -> float:
        """The mean number of accepted tokens of a step."""
        return self.accepted / max(self.steps, 1)

    @property
    def share_from_answer(self) -> float:
        """The share of accepted tokens that the answer repeated from itself."""
        return self.accepted_from_answer / max(self.accepted, 1)


def simulate_lookup(
    prompt: Sequence[int], answer: Sequence[int], *, num_draft_tokens: int = 7, longest: int = 4, shortest: int = 2
) -> LookupFigures:
    """Return the figures of one answer. Its first token comes with the prompt, without a decode step."""
    tokens = [*prompt, *answer]
    ends: dict[tuple[int, ...], int] = {}
    """The latest place after each n-gram."""
    indexed = 0
    known = len(prompt) + 1
    figures = LookupFigures()
    while known < len(tokens):
        # The n-grams that end before the last known token; those at its end are looked up.
        for end in range(indexed + 1, known):
            ends |= {tuple(tokens[end - n : end]): end for n in range(shortest, min(longest, end) + 1)}
        indexed = known - 1
        suffixes = (tuple(tokens[known - n : known]) for n in range(min(longest, known), shortest - 1, -1))
        start = next((ends[suffix] for suffix in suffixes if suffix in ends), None)
        accepted = 0
        if start is not None:
            draft = tokens[start : min(start + num_draft_tokens, known)]
            wanted = tokens[known:]
            while accepted < min(len(draft), len(wanted)) and draft[accepted] == wanted[accepted]:
                accepted += 1
        from_answer = accepted if start is not None and start >= len(prompt) else 0
        figures += LookupFigures(1, int(start is not None), accepted, from_answer)
        known += accepted + 1
    return figures
