"""The routes of stored responses: reads, lists, deletes them, and cancels a response that is being written."""

from __future__ import annotations

from urllib.parse import parse_qs

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.server.errors import HttpError
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.responses_api.bodies import DeletedResponse, InputItemList
from jaxserve.server.server_state import ServerState

_MAX_ITEMS = 100


async def get_response(state: ServerState, exchange: HttpExchange) -> None:
    """Answer with a response that is kept, or with what is there of one that is being written."""
    response_id = _response_id(exchange)
    if parse_qs(exchange.scope["query_string"].decode(errors="replace")).get("stream", ["false"])[-1] == "true":
        raise InvalidRequestError(
            "stream is not supported here: leave it out, or stream the response when you create it", param="stream"
        )
    stored = await state.stored_response(response_id)
    found = await state.open_response(response_id) if stored is None else stored.body
    if found is None:
        raise lost_response(response_id)
    await exchange.respond(msgspec.Raw(found))


async def delete_response(state: ServerState, exchange: HttpExchange) -> None:
    """Forget a response."""
    response_id = _response_id(exchange)
    if not await state.delete_response(response_id):
        raise lost_response(response_id)
    await exchange.respond(DeletedResponse(id=response_id))


async def cancel_response(state: ServerState, exchange: HttpExchange) -> None:
    """Abort a response that is being written, and answer with what is there of it."""
    response_id = _response_id(exchange)
    found = await state.open_response(response_id, cancels=True)
    if found is None and await state.stored_response(response_id) is not None:
        raise InvalidRequestError("The response has ended, so there is nothing to cancel", param="response_id")
    if found is None:
        raise lost_response(response_id)
    await exchange.respond(msgspec.Raw(found))


async def list_input_items(state: ServerState, exchange: HttpExchange) -> None:
    """Answer with a page of the items that a response was an answer to, the last ones first unless `order` is asc."""
    response_id = _response_id(exchange)
    stored = await state.stored_response(response_id)
    if stored is None:
        raise lost_response(response_id)
    given = {name: values[-1] for name, values in parse_qs(exchange.scope["query_string"].decode("latin-1")).items()}
    limit, order = given.get("limit", "20"), given.get("order", "desc")
    if not limit.isdecimal() or not 1 <= int(limit) <= _MAX_ITEMS:
        raise InvalidRequestError(f"limit must be a number in [1, {_MAX_ITEMS}], got {limit[:40]!r}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order must be asc or desc, got {order[:40]!r}", param="order")
    items = stored.input if order == "asc" else stored.input[::-1]
    if (after := given.get("after")) is not None:
        places = [number for number, item in enumerate(items) if item.id == after]
        if not places:
            raise InvalidRequestError(f"after: the response has no input item {after[:100]!r}", param="after")
        items = items[places[0] + 1 :]
    shown = items[: int(limit)]
    page = InputItemList(
        data=[msgspec.json.decode(item.json) for item in shown],
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
        has_more=len(items) > len(shown),
    )
    await exchange.respond(page)


def _response_id(exchange: HttpExchange) -> str:
    return str(exchange.scope["path_params"]["response_id"])


def lost_response(response_id: str, param: str = "response_id", code: str | None = None) -> HttpError:
    """Return the 404 for a response that isn't there, which the field `param` names."""
    return HttpError(
        404,
        f"Response with id '{response_id[:100]}' not found: it was never stored, or it has been deleted, or it made "
        "room for others; send the conversation itself as input, or start the server with a larger "
        "--max-stored-responses, --max-stored-response-bytes or --stored-response-seconds",
        param=param,
        code=code,
    )
