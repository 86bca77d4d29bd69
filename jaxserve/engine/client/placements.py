"""What the API processes of a server tell each other about replicas: which request each placed where, and its end.

Each has a router of its own; with these updates every router knows the load and the cached prefixes that all of them
cause. An update may be late or lost, which costs speed, never correctness.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class Placed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request was placed: `page_names` are the pages of its prompt, `pending_tokens` of it are to be computed."""

    request_id: str
    replica: int
    pending_tokens: int
    page_names: list[int]


class Began(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A placed request has begun to answer."""

    request_id: str


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A placed request has ended; its replica has cached `num_output_pages` pages of its output."""

    request_id: str
    num_output_pages: int = 0


class CachesCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The prefix caches of all replicas were flushed."""


PlacementUpdate = Placed | Began | Ended | CachesCleared


class PlacementListener(Protocol):
    """Applies the updates of other API processes."""

    def apply_update(self, update: bytes, origin: int) -> None:
        """Apply an update of the API process `origin`, in msgpack."""
        ...

    def forget(self, origin: int) -> None:
        """Forget the open requests of an API process that has ended."""
        ...


class PlacementBroadcast(Protocol):
    """Sends updates to the other API processes of a server. `listener` applies theirs."""

    listener: PlacementListener | None

    def send_update(self, update: bytes) -> None:
        """Send an update to all others."""
        ...
