"""What the API processes of a server tell each other about replicas: which request each placed where, and its end.

Each has a router of its own; with this news all of them know the load and the cached prefixes that all of them cause.
News may be late or lost, which costs speed, never correctness.
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
    """A placed request has ended, with so many pages of output."""

    request_id: str
    num_output_pages: int = 0


class CachesCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The prefix caches of all replicas were flushed."""


News = Placed | Began | Ended | CachesCleared


class NewsListener(Protocol):
    """Takes the news of other API processes."""

    def hear(self, news: bytes, origin: int) -> None:
        """Take news of the API process `origin`, in msgpack."""
        ...

    def forget(self, origin: int) -> None:
        """Forget the open requests of an API process that has ended."""
        ...


class NewsLine(Protocol):
    """Connects the API processes of a server."""

    listener: NewsListener | None

    def tell(self, news: bytes) -> None:
        """Send news to all others."""
        ...
