"""Remembers which step computed each slot last: with pipeline stages, a later step may have to wait for its token."""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.step_plan import Chunk, DraftRead, Draw


class StepOrder:
    """The number of the last step of each slot."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], int] = {}

    def add(self, chunks: Iterable[Chunk], number: int) -> None:
        """Note the slots of a step."""
        for chunk in chunks:
            self._last[chunk.rank, chunk.slot] = number

    def last_decoded(self, chunks: Iterable[Chunk]) -> int:
        """Return the last step of the slots that decode, -1 if none does: the tokens of others are known."""
        return max((self._last[chunk.rank, chunk.slot] for chunk in chunks if chunk.tokens is None), default=-1)

    def last_of(self, some: Iterable[Draw | DraftRead]) -> int:
        """Return the last step of these slots."""
        return max((self._last[one.rank, one.slot] for one in some), default=-1)
