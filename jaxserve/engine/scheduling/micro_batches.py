"""Divides the decoding requests of all ranks among micro-batches: one for each pipeline stage.

A step decodes one micro-batch. Its decodes need tokens that the last stage draws at the end of their step before, so
with as many micro-batches as stages, planned in turn, no stage waits. All ranks step together: a step decodes the same
micro-batch of each. A request joins the micro-batch of the step that computes the end of its prompt, and moves only to
even out the sizes. This module keeps the order of turns and knows what is in flight; the planner plans the decodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from jaxserve.engine.scheduling.rank import Rank
from jaxserve.engine.scheduling.request import Request


class MicroBatches:
    """The micro-batches of `ranks`, of which each request is in `Request.micro_batch`.

    There are `count` of them. Each may have `most_in_flight` steps in flight.
    """

    def __init__(self, ranks: Sequence[Rank], count: int, most_in_flight: int) -> None:
        self._ranks = ranks
        self._count = count
        self._most_in_flight = most_in_flight
        self._num_steps = 0
        self._last_steps = [-count] * count  # no request of a micro-batch had a later one
        # For each step in flight, the micro-batches that its requests are in; some may have moved since.
        self._in_flight: deque[set[int]] = deque()

    @property
    def turns(self) -> list[int]:
        """The micro-batches, the one first whose last step was planned the longest ago."""
        return sorted(range(self._count), key=self._last_steps.__getitem__)

    def divide(self) -> list[list[list[Request]]]:
        """Return the decoding requests by micro-batch and rank, in the order in which they began to decode."""
        parts: list[list[list[Request]]] = [[[] for _ in self._ranks] for _ in range(self._count)]
        for index, rank in enumerate(self._ranks):
            own = [part[index] for part in parts]
            for request in rank.decoding.values():
                own[request.micro_batch].append(request)
        return parts

    def is_drawn(self, number: int) -> bool:
        """Return whether the tokens of a micro-batch are drawn before the first stage can begin the next step."""
        return self._num_steps - self._last_steps[number] >= self._count

    def may_step(self, number: int) -> bool:
        """Return whether few enough steps of a micro-batch are in flight to plan one more."""
        return sum(number in step for step in self._in_flight) < self._most_in_flight

    def even_out(self, number: int, parts: list[list[list[Request]]]) -> None:
        """Move requests from a micro-batch whose turn it is to smaller ones, until the sizes on a rank are even.

        The newest requests move, and wait for the turns of these.
        """
        later = [other for other in self.turns if other != number]
        for index in range(len(self._ranks)):
            requests = parts[number][index]
            while True:
                smallest = min(later, key=lambda other: len(parts[other][index]))
                if len(requests) - len(parts[smallest][index]) < 2:
                    break
                request = requests.pop()
                request.micro_batch = smallest
                parts[smallest][index].append(request)
                self._last_steps[smallest] = max(self._last_steps[smallest], self._last_steps[number])
                for step in self._in_flight:
                    if number in step:
                        step.add(smallest)

    def add_step(self, number: int) -> None:
        """Count a planned step of a micro-batch."""
        self._last_steps[number] = self._num_steps
        self._num_steps += 1
        self._in_flight.append({number})

    def end_step(self) -> None:
        """Count the commit of the oldest step in flight."""
        self._in_flight.popleft()
