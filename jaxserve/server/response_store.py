"""Keeps responses for clients that continue them by id, up to a number, a size and an age; and those being written.

A response has its own input and output, and a link to the turn before it, so a long conversation is kept once. What a
response needs stays as long as the response. Knows no shapes: items are JSON.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

OpenStatus = Literal["in_progress", "cancelled"]
type Snapshot = Callable[[OpenStatus], bytes]


class StoredItem(NamedTuple):
    """An item as JSON, and its id."""

    id: str
    json: bytes


class StoredResponse(msgspec.Struct, frozen=True):
    """A response as JSON, all the items that it was an answer to, and its own."""

    body: bytes
    input: list[StoredItem]
    output: list[StoredItem]


@dataclass(eq=False)
class _Turn:
    """The items of one response, and the turn that it continues. `users` are the responses and turns that need it."""

    before: _Turn | None
    input: Sequence[StoredItem]
    output: Sequence[StoredItem] = ()
    users: int = 0

    @property
    def items(self) -> list[StoredItem]:
        """All of its items."""
        return [*self.input, *self.output]

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return sum(len(item.id) + len(item.json) for item in self.items)


@dataclass
class _Entry:
    body: bytes
    turn: _Turn
    used_at: float


@dataclass
class ResponseStore:
    """The responses of one API process, of which those that were not used for longest go first.

    `max_age` is in seconds since the last use. After each change, `on_change` gets the number and the size of what is
    kept, and how many were evicted.
    """

    max_count: int
    max_bytes: int
    max_age: float
    clock: Callable[[], float] = time.monotonic
    on_change: Callable[[int, int, int], None] = lambda *_: None
    num_bytes: int = 0
    num_evicted: int = 0
    _entries: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)
    _items: dict[str, _Turn] = field(default_factory=dict)
    _open: dict[str, Snapshot] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._entries)

    def put(
        self,
        response_id: str,
        body: bytes,
        *,
        continued: tuple[str, Sequence[StoredItem]] | None,
        input: Sequence[StoredItem],
        output: Sequence[StoredItem],
    ) -> None:
        """Keep a response that continues another one, whose id and items are given, or none."""
        if not self.max_count:
            return
        before = None
        if continued is not None:
            previous = self._entries.get(continued[0])
            before = _Turn(None, continued[1]) if previous is None else previous.turn
        entry, replaced = _Entry(body, _Turn(before, input, output), self.clock()), self._entries.pop(response_id, None)
        self._entries[response_id] = entry
        self.num_bytes += len(body)
        self._hold(entry.turn)
        if replaced is not None:  # the client chose this id before
            self._release(replaced)
        self._evict(self.clock() - self.max_age)

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response, which counts as used now, or None."""
        self._evict(self.clock() - self.max_age)
        entry = self._entries.get(response_id)
        if entry is None:
            return None
        entry.used_at = self.clock()
        self._entries.move_to_end(response_id)
        turns, turn = [], entry.turn.before
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        before = [item for one in reversed(turns) for item in one.items]
        return StoredResponse(entry.body, [*before, *entry.turn.input], [*entry.turn.output])

    def item(self, item_id: str) -> bytes | None:
        """Return an item of a response that is kept, or None."""
        turn = self._items.get(item_id)
        return None if turn is None else next(item.json for item in turn.items if item.id == item_id)

    def delete(self, response_id: str) -> bool:
        """Forget a response, and return whether it was there."""
        entry = self._entries.pop(response_id, None)
        if entry is not None:
            self._release(entry)
            self.on_change(len(self._entries), self.num_bytes, 0)
        return entry is not None

    @contextmanager
    def writing(self, response_id: str, snapshot: Snapshot) -> Iterator[None]:
        """Let `snapshot` find a response that is being written."""
        self._open[response_id] = snapshot
        try:
            yield
        finally:
            if self._open.get(response_id) is snapshot:
                del self._open[response_id]

    def snapshot(self, response_id: str, status: OpenStatus) -> bytes | None:
        """Return a response that is being written, with a status; None if it isn't."""
        write = self._open.get(response_id)
        return None if write is None else write(status)

    def _evict(self, oldest: float) -> None:
        """Forget what was not used since `oldest`, and what is beyond the bounds."""
        num_evicted = 0
        while self._entries and (
            len(self._entries) > self.max_count
            or self.num_bytes > self.max_bytes
            or next(iter(self._entries.values())).used_at < oldest
        ):
            _, entry = self._entries.popitem(last=False)
            self._release(entry)
            num_evicted += 1
        self.num_evicted += num_evicted
        self.on_change(len(self._entries), self.num_bytes, num_evicted)

    def _hold(self, turn: _Turn) -> None:
        turn.users += 1
        if turn.users > 1:
            return
        self.num_bytes += turn.size
        self._items.update((item.id, turn) for item in turn.items)
        if turn.before is not None:
            self._hold(turn.before)

    def _release(self, entry: _Entry) -> None:
        self.num_bytes -= len(entry.body)
        turn: _Turn | None = entry.turn
        while turn is not None:
            turn.users -= 1
            if turn.users:
                return
            self.num_bytes -= turn.size
            for item in turn.items:
                if self._items.get(item.id) is turn:
                    del self._items[item.id]
            turn = turn.before
