"""Routes that OpenAI does not have: `/tokenize`, `/detokenize` and `/tokenizer_info` (vLLM's shapes), `/abort_request`
(SGLang's)."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.server.generation.chat_messages import render_prompt
from jaxserve.server.generation.chat_tools import Tools, chat_tool_use
from jaxserve.server.generation.message_fields import (
    CONTINUE_FINAL_MESSAGE,
    Documents,
    Messages,
    TemplateArguments,
    TemplateSource,
)
from jaxserve.server.generation.prompts import encode_texts, run_off_event_loop
from jaxserve.server.generation.request_templates import with_template_of
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.fields import (
    ModelName,
    Null,
    NullOrEmptyObject,
    NullOrEmptyText,
    NullOrFalse,
    VocabularyId,
    one_of,
    refuse_unsupported_fields,
)
from jaxserve.server.server_state import ServerState
from jaxserve.text.requests import check_ids

_CHAT_FIELDS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "tools",
    "escape_marks",
)
# Without messages, the fields of a chat must have no effect.
_CHAT_FIELDS_NEED_MESSAGES = {
    "anyOf": [
        {"properties": {name: {"enum": [None, False, {}, []]} for name in _CHAT_FIELDS}},
        {"required": ["messages"], "properties": {"messages": {"type": "array"}}},
    ]
}


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/tokenize`: either a text (`prompt`) or a chat (`messages`)."""

    conditions: ClassVar[tuple[dict[str, Any], ...]] = (
        one_of("prompt", "messages"),
        _CHAT_FIELDS_NEED_MESSAGES,
        CONTINUE_FINAL_MESSAGE,
    )

    model: ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: TemplateSource | None = None
    chat_template_kwargs: TemplateArguments | None = None
    documents: Documents | None = None
    escape_marks: bool | None = None
    return_token_strs: bool | None = None

    tools: Tools | None = None

    mm_processor_kwargs: NullOrEmptyObject = None
    media_io_kwargs: NullOrEmptyObject = None
    return_token_offsets: NullOrFalse = None


class TokenizeResponse(msgspec.Struct):
    """The ids that a request with this prompt would have."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/detokenize`: ids to decode."""

    model: ModelName | None = None
    tokens: list[VocabularyId]


class DetokenizeResponse(msgspec.Struct):
    """The text of the ids, including special tokens."""

    prompt: str


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/abort_request`. `rid` is the id of a response (`cmpl-…`), of an output of `/generate`, or the
    X-Request-Id of a request."""

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

    abort_message: NullOrEmptyText = None
    finished_reason: Null = None


class AbortResponse(msgspec.Struct):
    """The number of aborted sequences; 0 if no request with this id was open."""

    rid: str | None
    aborted: int


async def tokenize(state: ServerState, exchange: HttpExchange, request: TokenizeRequest) -> None:
    """Answer with the ids of a text or a chat."""
    loaded = state.require_loaded()
    refuse_unsupported_fields(request)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("Give one of prompt and messages", param="prompt")
    if request.messages is not None:
        tools = chat_tool_use(request.tools, None, several=True)
        loaded = await with_template_of(state, loaded, request.chat_template)
        _, text, encoder = await render_prompt(state, loaded, request.messages, request, tools.shown if tools else None)
        add_special_tokens = request.add_special_tokens is True
    else:
        for name in _CHAT_FIELDS:
            if getattr(request, name):
                raise InvalidRequestError(f"{name} needs messages", param=name)
        text, add_special_tokens = request.prompt or "", request.add_special_tokens is not False
        encoder = loaded.tokenizer
    (ids,) = await encode_texts(
        state, loaded, [text], add_special_tokens=add_special_tokens, param=None, encoder=encoder
    )
    names = None
    if request.return_token_strs:
        names = await run_off_event_loop(state, len(ids), lambda: [loaded.tokenizer.token_text(token) for token in ids])
    await exchange.respond(TokenizeResponse(len(ids), loaded.max_model_len, ids, names))


async def tokenizer_info(state: ServerState, exchange: HttpExchange) -> None:
    """Answer with what a tokenizer_config.json of this tokenizer would say, and the chat template that is used."""
    loaded = state.require_loaded()
    tokenizer = loaded.tokenizer
    info: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokenizer.special_tokens,
        "model_max_length": loaded.max_model_len,
        "added_tokens_decoder": tokenizer.added_tokens(),
    }
    await exchange.respond(info | ({"chat_template": loaded.template_source} if loaded.template_source else {}))


async def detokenize(state: ServerState, exchange: HttpExchange, request: DetokenizeRequest) -> None:
    """Answer with the text of ids."""
    loaded = state.require_loaded()

    def decode() -> str:
        check_ids(request.tokens, loaded.engine.info.vocab_size, param="tokens")
        return loaded.tokenizer.decode(request.tokens, skip_special_tokens=False)

    text = await run_off_event_loop(state, len(request.tokens), decode)
    await exchange.respond(DetokenizeResponse(text))


async def abort_request(state: ServerState, exchange: HttpExchange, request: AbortRequest) -> None:
    """Abort one open request, or all; their responses end with finish reason `abort`."""
    refuse_unsupported_fields(request)
    if not request.rid and not request.abort_all:
        raise InvalidRequestError("Give a rid, or abort_all", param="rid")
    aborted = await state.abort(None if request.abort_all else request.rid)
    await exchange.respond(AbortResponse(request.rid, aborted))
