"""Routes that OpenAI does not have: `/tokenize`, `/detokenize` (vLLM's shapes) and `/abort_request` (SGLang's)."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.server.generation.prompts import encode, off_loop
from jaxserve.server.http.bodies import Exchange
from jaxserve.server.http.fields import (
    ModelName,
    Null,
    NullOrFalse,
    NullOrNoList,
    NullOrNoObject,
    NullOrNoText,
    TokenIdHere,
    one_of,
    refuse_asking,
)
from jaxserve.server.openai.chat_messages import render
from jaxserve.server.openai.protocol import CONTINUED, Documents, Messages, TemplateArguments
from jaxserve.server.server_state import Serving
from jaxserve.text.requests import check_ids

_CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "documents")
# Without messages, what is said of a chat must ask for nothing.
_OF_A_CHAT = {
    "anyOf": [
        {"properties": {name: {"enum": [None, False, {}, []]} for name in _CHAT_FIELDS}},
        {"required": ["messages"], "properties": {"messages": {"type": "array"}}},
    ]
}


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text (`prompt`) or a chat (`messages`), one of the two."""

    conditions: ClassVar[tuple[dict[str, Any], ...]] = (one_of("prompt", "messages"), _OF_A_CHAT, CONTINUED)

    model: ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    documents: Documents | None = None
    return_token_strs: bool | None = None

    tools: NullOrNoList = None
    chat_template: Null = None
    mm_processor_kwargs: NullOrNoObject = None
    media_io_kwargs: NullOrNoObject = None
    return_token_offsets: NullOrFalse = None


class _Chat(msgspec.Struct):
    messages: Messages
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None
    documents: list[dict[str, Any]] | None


class TokenizeResponse(msgspec.Struct):
    """The ids of a prompt as a request with it would have them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The ids to turn into text."""

    model: ModelName | None = None
    tokens: list[TokenIdHere]


class DetokenizeResponse(msgspec.Struct):
    """The text of the ids, special tokens included."""

    prompt: str


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`rid` is the id of a response (`cmpl-…`) or the X-Request-Id of its request; `abort_all` is every open one."""

    conditions: ClassVar[tuple[dict[str, Any], ...]] = (
        {
            "anyOf": [
                {"required": ["rid"], "properties": {"rid": {"type": "string", "minLength": 1}}},
                {"required": ["abort_all"], "properties": {"abort_all": {"const": True}}},
            ]
        },
    )

    rid: str | None = None
    abort_all: bool | None = None

    abort_message: NullOrNoText = None
    finished_reason: Null = None


class AbortResponse(msgspec.Struct):
    """How many running sequences were asked to end; 0 when nothing of that id was open."""

    rid: str | None
    aborted: int


async def tokenize(serving: Serving, exchange: Exchange, request: TokenizeRequest) -> None:
    """Text or chat to ids."""
    loaded = serving.require()
    refuse_asking(request)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("Give one of prompt and messages", param="prompt")
    if request.messages is not None:
        chat = _Chat(
            request.messages,
            request.add_generation_prompt,
            request.continue_final_message,
            request.chat_template_kwargs,
            request.documents,
        )
        text, special = await render(serving, loaded, chat), request.add_special_tokens is True
    else:
        for name in _CHAT_FIELDS:
            if getattr(request, name):
                raise InvalidRequestError(f"{name} needs messages", param=name)
        text, special = request.prompt or "", request.add_special_tokens is not False
    (ids,) = await encode(serving, loaded, [text], add_special_tokens=special, param=None)
    names = None
    if request.return_token_strs:
        names = await off_loop(serving, len(ids), lambda: [loaded.tokenizer.token_text(token) for token in ids])
    await exchange.respond(TokenizeResponse(len(ids), loaded.engine.info.max_model_len, ids, names))


async def detokenize(serving: Serving, exchange: Exchange, request: DetokenizeRequest) -> None:
    """Ids to text."""
    loaded = serving.require()

    def decode() -> str:
        check_ids(request.tokens, loaded.engine.info.vocab_size, param="tokens")
        return loaded.tokenizer.decode(request.tokens, skip_special_tokens=False)

    text = await off_loop(serving, len(request.tokens), decode)
    await exchange.respond(DetokenizeResponse(text))


async def abort_request(serving: Serving, exchange: Exchange, request: AbortRequest) -> None:
    """Ends an open request, or all; a response ends with finish reason `abort`."""
    refuse_asking(request)
    if not request.rid and not request.abort_all:
        raise InvalidRequestError("Give a rid, or abort_all", param="rid")
    aborted = serving.abort_all() if request.abort_all else serving.abort(request.rid or "")
    await exchange.respond(AbortResponse(request.rid, aborted))
