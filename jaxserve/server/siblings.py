"""What the API processes of one server ask each other. A server with one API process has no siblings."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec


class AbortQuestion(msgspec.Struct, frozen=True, tag=True):
    """Abort the open requests with the id `rid`, or all if it is None. The answer is how many sequences are aborted."""

    rid: str | None


class DescribeQuestion(msgspec.Struct, frozen=True, tag=True):
    """The answer is an `ApiProcessInfo`."""


class ResponseQuestion(msgspec.Struct, frozen=True, tag=True):
    """The answer is the `StoredResponse` of this id, or None."""

    response_id: str


class ItemQuestion(msgspec.Struct, frozen=True, tag=True):
    """The answer is the item of this id in a stored response, as JSON, or None."""

    item_id: str


class OpenResponseQuestion(msgspec.Struct, frozen=True, tag=True):
    """The answer is the response of this id that is being written, as JSON, or None. With `cancels`, it is aborted."""

    response_id: str
    cancels: bool


class DeleteQuestion(msgspec.Struct, frozen=True, tag=True):
    """Forget the stored response of this id. The answer is whether it was there."""

    response_id: str


Question = AbortQuestion | DescribeQuestion | ResponseQuestion | ItemQuestion | OpenResponseQuestion | DeleteQuestion


class ApiProcessInfo(msgspec.Struct, frozen=True):
    """An API process: its id, and how many requests it has open."""

    pid: int
    open_requests: int


class Siblings(Protocol):
    """The other API processes of a server."""

    async def ask(self, question: Question) -> list[Any]:
        """Return the answers of all others that answer in time."""
        ...


class NoSiblings:
    """The siblings of the only API process."""

    async def ask(self, question: Question) -> list[Any]:
        """Return no answers."""
        return []
