"""The rows of states of the running requests of a rank, in a model that keeps a state for each sequence.

A request owns a row from its start on. The device leaves there the state at the last border of its certain tokens
(`Capacity.folded_tokens`). Other rows become snapshots, from which later requests go on: at the end of a prompt, where
it branches off from another one, now and then in a long one, and where a request stops. This module decides which rows
a chunk writes. The tree owns the snapshots.
"""

from __future__ import annotations

from jaxserve.engine.kv_cache.radix_cache import RadixCache
from jaxserve.engine.kv_cache.radix_node import RadixNode
from jaxserve.engine.kv_cache.state_pool import ON_DEVICE
from jaxserve.engine.scheduling.request import Request
from jaxserve.engine.scheduling.state_row import StateRow
from jaxserve.step_plan import Capacity, StateWrite

NOT_REPEATED = 4
"""Tokens at the end of a prompt that the next turn may not repeat: the marks with which a template begins the reasoning
of an answer, and leaves it out where the answer is repeated."""


class RequestStates:
    """Decides within `capacity`. Long prompts leave a snapshot every `interval` tokens, if it isn't 0."""

    def __init__(self, capacity: Capacity, cache: RadixCache, interval: int) -> None:
        assert capacity.num_states >= capacity.num_slots, capacity
        assert capacity.state_unit % capacity.page_size == 0 == capacity.state_unit % capacity.state_block, capacity
        assert cache.states is not None
        self._capacity = capacity
        self._unit = capacity.state_unit
        self._interval = interval
        self._cache = cache
        self._prefixes = cache.states
        self._pool = cache.states.pool

    @property
    def num_available(self) -> int:
        """The number of rows with which requests can start now."""
        return self._pool.num_available

    def start(self, request: Request, node: RadixNode, num_pages: int) -> tuple[int | None, int]:
        """Give a request a row. Return the row that it reads first, if any, and of how many tokens that has the state.

        It starts with the prefix of `num_pages` pages that ends at `node`.
        """
        rows, known = self._prefixes.start(node, num_pages)
        last = self._border(request.num_fill_tokens - 1)
        earlier = self._border(request.num_fill_tokens - 1 - NOT_REPEATED)
        borders = self._border(num_pages * self._capacity.page_size), earlier if earlier > known else last
        due = sorted({border for border in borders if border > known})
        request.state = StateRow(rows.own, known, due, request.priority)
        return rows.source, known

    def expect_snapshot(self, request: Request, tokens: list[int], least: int) -> bool:
        """Return whether a prompt will leave a snapshot after `least` tokens or more of a waiting one's `tokens`.

        The first time that it is asked, one becomes due where the two branch off.
        """
        state, planned = request.state, request.num_planned_tokens
        assert state is not None
        shared = _num_equal(request.fill_tokens, tokens)
        branch = shared // self._unit * self._unit
        if branch > planned and branch >= least and branch not in state.due and len(state.due) < 2:
            state.due = sorted([branch, *state.due])
        return any(planned < border and least <= border <= shared for border in state.due)

    def write_prompt(self, request: Request, start: int) -> StateWrite | None:
        """Plan what a chunk of fill tokens from `start` on writes; its pages were handed to the cache."""
        state, end = request.state, request.num_planned_tokens
        assert state is not None
        state.certain = end
        border = self._snapshot_border(state, start, end)
        node = self._cache.end_of(request.namespace, request.tokens(0, border)) if border else None
        row = None
        # Nodes that no request has locked may be evicted before the step has written their state.
        if node is not None and node.locks and node.states[ON_DEVICE] is None:
            row = self._prefixes.take()
        if row is None or node is None:
            return StateWrite(state.row) if start == state.started_at else None
        self._prefixes.give(node, row)
        self._pool.hold(node)
        state.last_snapshot = border
        return StateWrite(state.row, row, border)

    def write_output(self, request: Request, num_tokens: int) -> StateWrite | None:
        """Plan what the step writes after which a request has at most `num_tokens` certain tokens.

        If prefixes end at fewer borders than states, the request keeps the row of the last one when its state moves on.
        """
        state, unit = request.state, self._unit
        assert state is not None
        border = None if unit == self._capacity.state_block else state.border(self._capacity)
        state.certain, state.unsure = num_tokens, request.num_unverified_tokens
        if border is None or border % unit or border <= state.last_snapshot:
            return None
        if self._capacity.folded_tokens(num_tokens) == border:
            return None
        row = self._prefixes.take() if state.states[ON_DEVICE] is None else self._pool.take_from(state)
        if row is None:
            return None
        self._pool.give(state, state.row)
        self._pool.hold(state)
        state.row, state.last_snapshot = row, border
        return StateWrite(row)

    def stop(self, request: Request, num_tokens: int) -> None:
        """Take the rows of a request that stops. The last one at a border where a prefix can end becomes a snapshot, if
        the cache has the pages; the first `num_tokens` tokens of the request are in whole pages."""
        state, found = request.state, False
        assert state is not None
        request.state = None
        rows = [(state.border(self._capacity), state.row)]
        if state.states[ON_DEVICE] is not None:
            rows.append((state.last_snapshot, self._pool.take_from(state)))
        for border, row in rows:
            node = None
            if border and border % self._unit == 0 and border <= num_tokens and not found:
                node = self._cache.end_of(request.namespace, request.tokens(0, border))
            found = found or node is not None
            self._prefixes.take_over(node, row)

    def _border(self, num_tokens: int) -> int:
        """Return the last place within this many tokens where a prefix can end."""
        return num_tokens // self._unit * self._unit

    def _snapshot_border(self, state: StateRow, start: int, end: int) -> int:
        """Return the border at which a chunk of tokens `start` to `end` takes a snapshot, or 0."""
        if due := state.due_in(start, end):
            return due[0]
        border = end // self._unit * self._unit
        is_long = 0 < self._interval <= border - state.last_snapshot
        return border if border > start and is_long else 0


def _num_equal(first: list[int], second: list[int]) -> int:
    """Return how many tokens of two prompts are the same from the beginning."""
    low, high = 0, min(len(first), len(second)) + 1  # the first `low` are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle)
    return low
