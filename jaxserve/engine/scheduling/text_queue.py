"""The texts that wait for a bidirectional model: which of them the next step computes, and on which rank.

Those with the least work come first, so that a query never waits behind a collection of documents. A text of a list
counts as long as the list up to it, as all of a list is answered together. Half of each step is kept for texts that
have waited long, so that all get their turn.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from jaxserve.api_types import EngineRequest
from jaxserve.engine.scheduling.policy import Policy
from jaxserve.step_plan import Capacity

LONG_WAIT = 0.5
"""Seconds after which a text has a right to be computed, in the order of arrival."""

# Texts that don't fit a step beside others before those after them are left for the next one
_MOST_PASSED_OVER = 32


class WaitingText:
    """A text from its arrival to its end."""

    def __init__(self, request: EngineRequest, arrived_at: float, priority: int = 0) -> None:
        self.request = request
        self.priority = priority
        self.arrived_at = arrived_at
        self.waits = True
        self.queue_seconds: float | None = None

    @property
    def length(self) -> int:
        """The number of its tokens."""
        return len(self.request.prompt_ids)


class ChosenText(NamedTuple):
    """A text that the next step computes, and its rank."""

    text: WaitingText
    rank: int


class TextQueue:
    """The waiting texts, in the order of a policy: of `fcfs` by arrival, of `priority` by priority, else by work.

    A step has up to `step_tokens` tokens of up to `step_texts` texts on each rank, or one longer text.
    """

    def __init__(
        self, capacity: Capacity, step_tokens: int, step_texts: int, policy: Policy = "lpm", seed: int = 0
    ) -> None:
        self._num_ranks = capacity.num_ranks
        self._step_texts = step_texts
        self._step_tokens = step_tokens
        self._policy = policy
        self._random = random.Random(seed)
        self._by_work: list[tuple[float, int, WaitingText]] = []
        self._by_arrival: deque[WaitingText] = deque()
        self._work: dict[str, int] = {}
        self._num_of_group: dict[str, int] = {}
        self._num_arrived = 0
        self.num_waiting = 0
        self.num_tokens = 0

    def add(self, text: WaitingText) -> None:
        """Add a text."""
        group = text.request.group_id or text.request.request_id
        self._work[group] = work = self._work.get(group, 0) + text.length
        self._num_of_group[group] = self._num_of_group.get(group, 0) + 1
        self._num_arrived += 1
        self.num_waiting += 1
        self.num_tokens += text.length
        heapq.heappush(self._by_work, (self._order(text, work), self._num_arrived, text))
        if self._policy != "priority":
            self._by_arrival.append(text)

    def remove(self, text: WaitingText) -> None:
        """Remove a text that waits."""
        assert text.waits
        text.waits = False
        self.num_waiting -= 1
        self.num_tokens -= text.length
        group = text.request.group_id or text.request.request_id
        self._num_of_group[group] -= 1
        if not self._num_of_group[group]:
            del self._num_of_group[group], self._work[group]

    def take(self, now: float) -> list[ChosenText]:
        """Remove the texts of the next step and return them."""
        step = _StepInTheMaking(self._num_ranks, self._step_tokens, self._step_texts)
        half = step.num_free // 2
        for text in self._overdue(now):
            if step.num_free <= half or not step.add(text):
                break
            self.remove(text)
        passed_over: list[tuple[float, int, WaitingText]] = []
        while self._by_work and step.num_free > 0 and len(passed_over) < _MOST_PASSED_OVER:
            entry = heapq.heappop(self._by_work)
            text = entry[-1]
            if text.waits and step.add(text):
                self.remove(text)
            elif text.waits:
                passed_over.append(entry)
        for entry in passed_over:
            heapq.heappush(self._by_work, entry)
        return step.chosen

    def _order(self, text: WaitingText, work: int) -> float:
        match self._policy:
            case "fcfs":
                return 0.0
            case "priority":
                return -text.priority
            case "random":
                return self._random.random()
        return work

    def _overdue(self, now: float) -> Iterator[WaitingText]:
        """Yield the texts that have waited long, by arrival; the caller removes each before it takes the next."""
        texts = self._by_arrival
        while texts:
            if not texts[0].waits:
                texts.popleft()
            elif now - texts[0].arrived_at < LONG_WAIT:
                return
            else:
                yield texts[0]


class _StepInTheMaking:
    """The texts of a step in the making, of at most so many tokens and texts on each rank."""

    def __init__(self, num_ranks: int, tokens: int, texts: int) -> None:
        self.chosen: list[ChosenText] = []
        self._tokens = tokens
        self._room = [tokens] * num_ranks
        self._rows = [texts] * num_ranks

    @property
    def num_free(self) -> int:
        """The tokens for which there is room."""
        return sum(self._room)

    def add(self, text: WaitingText) -> bool:
        """Add a text to the rank with most room, if it fits; one that fits no step has a rank for itself."""
        room = max(self._room)
        rank = self._room.index(room)
        if not self._rows[rank] or (text.length > room and room < self._tokens):
            return False
        self._room[rank] = max(room - text.length, 0)
        self._rows[rank] -= 1
        self.chosen.append(ChosenText(text, rank))
        return True
