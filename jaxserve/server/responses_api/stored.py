"""The routes of stored responses: reads, lists, deletes them, and cancels a response that is being written."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.server.errors import HttpError
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.response_store import StoredItem, StoredResponse
from jaxserve.server.responses_api.bodies import DeletedResponse, InputItemList
from jaxserve.server.responses_api.items import kind_of
from jaxserve.server.server_state import ServerState

_LIMIT = re.compile("[1-9][0-9]?|100")
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


async def get_response(state: ServerState, exchange: HttpExchange) -> None:
    """Answer with a response that is kept, or with what is there of one that is being written."""
    query = _query(exchange)
    for name in ("stream", "starting_after"):
        if query.get(name, "false") not in ("false", "0"):
            raise InvalidRequestError(
                f"{name} is not supported here: leave it out, or stream the response when you create it", param=name
            )
    found = await state.open_response(_response_id(exchange))
    if found is None:
        found = (await stored_response(state, _response_id(exchange))).body
    await exchange.respond(msgspec.Raw(found))


async def delete_response(state: ServerState, exchange: HttpExchange) -> None:
    """Forget a response."""
    response_id = _response_id(exchange)
    if not await state.delete_response(response_id):
        await stored_response(state, response_id)
    await exchange.respond(DeletedResponse(id=response_id))


async def cancel_response(state: ServerState, exchange: HttpExchange) -> None:
    """Abort a response that is being written, and answer with what is there of it."""
    response_id = _response_id(exchange)
    found = await state.open_response(response_id, cancels=True)
    if found is None:
        await stored_response(state, response_id)
        raise InvalidRequestError(
            "The response has ended, so there is nothing to cancel; GET answers with it", param="response_id"
        )
    await exchange.respond(msgspec.Raw(found))


async def list_input_items(state: ServerState, exchange: HttpExchange) -> None:
    """Answer with a page of the items that a response was an answer to, the last ones first unless `order` is asc."""
    stored = await stored_response(state, _response_id(exchange))
    query = _query(exchange)
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not _LIMIT.fullmatch(limit):
        raise InvalidRequestError(f"limit must be a number in [1, 100], got {limit[:40]!r}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order must be asc or desc, got {order[:40]!r}", param="order")
    items = stored.input if order == "asc" else stored.input[::-1]
    if (after := query.get("after")) is not None:
        places = [number for number, item in enumerate(items) if item.id == after]
        if not places:
            raise InvalidRequestError(
                f"after: the response has no input item {after[:100]!r}; send the last_id of a page", param="after"
            )
        items = items[places[0] + 1 :]
    shown = items[: int(limit)]
    page = InputItemList(
        data=[msgspec.json.decode(item.json) for item in shown],
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
        has_more=len(items) > len(shown),
    )
    await exchange.respond(page)


def _query(exchange: HttpExchange) -> dict[str, str]:
    query = parse_qs(exchange.scope["query_string"].decode("latin-1"))
    return {name: values[-1].lower() if name == "stream" else values[-1] for name, values in query.items()}


def _response_id(exchange: HttpExchange) -> str:
    return str(exchange.scope["path_params"]["response_id"])


async def stored_response(
    state: ServerState, response_id: str, param: str = "response_id", code: str | None = None
) -> StoredResponse:
    """Return a response that is kept. Raises `HttpError` 404, with a code, for one that isn't, which the field `param`
    names, and `InvalidRequestError` for one that is still being written."""
    found = await state.stored_response(response_id)
    if found is not None:
        return found
    if await state.open_response(response_id) is not None:
        raise InvalidRequestError(
            f"Response with id '{response_id[:100]}' is still being written; wait for its end, or cancel it",
            param=param,
        )
    raise HttpError(
        404,
        f"Response with id '{response_id[:100]}' not found: it was never stored, or it has been deleted, or it made "
        "room for others; send the conversation itself as input, or start the server with a larger "
        "--max-stored-responses, --max-stored-response-bytes or --stored-response-seconds",
        param=param,
        code=code,
    )


def stored_items(items: Sequence[Mapping[str, Any]], before: Sequence[StoredItem]) -> list[StoredItem]:
    """Return items for the store after those `before`: each with its type, parts of its content and an id of its own.

    What was sent again with an id that another one has gets a new one, so that pages of items end.
    """
    taken = {item.id for item in before}
    found = []
    for item in items:
        kind, name = kind_of(item), item.get("id")
        if not isinstance(name, str) or not name or name in taken:
            name = f"{_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"
        taken.add(name)
        whole = {**item, "type": kind, "id": name}
        if kind == "message" and isinstance(item.get("content"), str):
            output = {"type": "output_text", "annotations": []}
            part = output if item.get("role") == "assistant" else {"type": "input_text"}
            whole["content"] = [part | {"text": item["content"]}]
        found.append(StoredItem(name, msgspec.json.encode(whole)))
    return found
