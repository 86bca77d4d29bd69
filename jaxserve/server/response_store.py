"""Keeps responses for clients that continue them by id, up to a number, a size and an age; and those being written.

A response has its own input and output, and a link to the turn before it, so a long conversation is kept once. What a
response needs stays as long as the response. Knows no shapes: items are JSON.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

OpenStatus = Literal["in_progress", "cancelled"]
type Snapshot = Callable[[OpenStatus], bytes]

# What an item and a response take besides their texts, in bytes.
_ITEM_BYTES, _RESPONSE_BYTES = 300, 1000
# The ids that this server makes are random, so no client can guess an id of another one.
_OWN_ID = re.compile(r"[a-z]+_[0-9a-f]{32}")


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
    """The items of the response `name`, and the turn that it continues. `users` are the responses and turns that need
    it."""

    name: str
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
        return sum(len(item.id) + len(item.json) + _ITEM_BYTES for item in self.items)


@dataclass
class _Entry:
    body: bytes
    turn: _Turn
    used_at: float

    @property
    def size(self) -> int:
        """Its size in bytes, without the turn's."""
        return len(self.body) + _RESPONSE_BYTES


@dataclass
class ResponseStore:
    """The responses of one API process. The least recently used are forgotten first.

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
    _items: dict[str, list[tuple[_Turn, bytes]]] = field(default_factory=dict)
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
        """Keep a response that continues another one, whose id and items are given, or none. One that is larger than
        all may be is not kept."""
        before = None
        if continued is not None:
            previous = self._entries.get(continued[0])
            before = _Turn(continued[0], None, continued[1]) if previous is None else previous.turn
        entry = _Entry(body, _Turn(response_id, before, input, output), self.clock())
        replaced = self._entries.pop(response_id, None)  # the client may have chosen this id before
        self._entries[response_id] = entry
        self.num_bytes += entry.size
        self._hold(entry.turn)
        if replaced is not None:
            self._release(replaced)
        if not self.max_count or self._size_alone(entry) > self.max_bytes:
            self._release(self._entries.pop(response_id))
        self.expire()

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response, which counts as used now, or None."""
        self.expire()
        entry = self._entries.get(response_id)
        if entry is None:
            return None
        self._use(response_id, entry)
        turns, turn = [], entry.turn.before
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        before = [item for one in reversed(turns) for item in one.items]
        return StoredResponse(entry.body, [*before, *entry.turn.input], [*entry.turn.output])

    def item(self, item_id: str) -> bytes | None:
        """Return an item of a response that is kept, which counts as used now, or None. Only items whose ids the server
        made are found."""
        self.expire()
        found = self._items.get(item_id)
        if found is None:
            return None
        turn, item = found[0]  # a client may have sent others with its id later
        if (entry := self._entries.get(turn.name)) is not None and entry.turn is turn:
            self._use(turn.name, entry)
        return item

    def delete(self, response_id: str) -> bool:
        """Forget a response, and return whether it was there."""
        entry = self._entries.pop(response_id, None)
        if entry is not None:
            self._release(entry)
            self.on_change(len(self._entries), self.num_bytes, 0)
        return entry is not None

    def expire(self) -> None:
        """Forget what was not used for too long, and what is beyond the bounds."""
        num_evicted, oldest = 0, self.clock() - self.max_age
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

    def _use(self, response_id: str, entry: _Entry) -> None:
        entry.used_at = self.clock()
        self._entries.move_to_end(response_id)

    def _size_alone(self, entry: _Entry) -> int:
        """Return the bytes that a response would take if no other were kept."""
        size, turn = entry.size, entry.turn
        while True:
            size += turn.size
            if turn.before is None or size > self.max_bytes:
                return size
            turn = turn.before

    def _hold(self, turn: _Turn) -> None:
        turn.users += 1
        if turn.users > 1:
            return
        self.num_bytes += turn.size
        for item in turn.items:
            if _OWN_ID.fullmatch(item.id):
                self._items.setdefault(item.id, []).append((turn, item.json))
        if turn.before is not None:
            self._hold(turn.before)

    def _release(self, entry: _Entry) -> None:
        self.num_bytes -= entry.size
        turn: _Turn | None = entry.turn
        while turn is not None:
            turn.users -= 1
            if turn.users:
                return
            self.num_bytes -= turn.size
            for item in turn.items:
                if (found := self._items.get(item.id)) is not None:
                    found[:] = [one for one in found if one[0] is not turn]
                    if not found:
                        del self._items[item.id]
            turn = turn.before
