"""The ASGI application: the table of routes and the middleware around them. The state is in `ServerState`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from jaxserve.server.admin import routes as admin_routes
from jaxserve.server.admin.openapi import Operation, openapi_document
from jaxserve.server.admin.profile import (
    ProfileResponse,
    StartProfileRequest,
    StopProfileRequest,
    start_profile,
    stop_profile,
)
from jaxserve.server.anthropic.messages import count_tokens, messages
from jaxserve.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from jaxserve.server.anthropic.responses import MessageResponse, TokenCount
from jaxserve.server.errors import cors_is_off
from jaxserve.server.http.auth import BearerAuth
from jaxserve.server.http.endpoint import BodilessEndpoint, BodilessHandler, JsonEndpoint, JsonHandler
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.paths import RootPath, plain_path
from jaxserve.server.http.request_id import RequestId
from jaxserve.server.openai.chat import chat_completions
from jaxserve.server.openai.completions import completions
from jaxserve.server.openai.models import get_model, list_models
from jaxserve.server.openai.protocol import ChatRequest, CompletionRequest
from jaxserve.server.openai.render import RenderedRequest, render_chat, render_completions
from jaxserve.server.openai.responses import ChatResponse, CompletionResponse, ModelCard, ModelList
from jaxserve.server.pooling.bodies import (
    ClassifyResponse,
    EmbeddingResponse,
    EncodeOutput,
    PoolingResponse,
    RerankResponse,
    ScoreResponse,
)
from jaxserve.server.pooling.classify import classify
from jaxserve.server.pooling.embeddings import embeddings, pooling
from jaxserve.server.pooling.encode import encode
from jaxserve.server.pooling.protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    EncodeRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from jaxserve.server.pooling.scoring import rerank, score
from jaxserve.server.responses_api.bodies import DeletedResponse, InputItemList, InputTokenCount, ResponseObject
from jaxserve.server.responses_api.protocol import ResponsesInput, ResponsesRequest
from jaxserve.server.responses_api.routes import count_input_tokens, create_response
from jaxserve.server.responses_api.stored import cancel_response, delete_response, get_response, list_input_items
from jaxserve.server.server_state import ServerState
from jaxserve.server.sglang.generate import generate
from jaxserve.server.sglang.generate_protocol import GenerateOutput, GenerateRequest
from jaxserve.server.sglang.loads import Loads, get_load, loads
from jaxserve.server.sglang.tokenize import (
    AbortRequest,
    AbortResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    abort_request,
    detokenize,
    tokenize,
    tokenizer_info,
)


class _App(Router):
    """The routes, with our own error responses for unknown routes and methods.

    Repeated and last slashes of a path are ignored where they lead to no route: clients that join a base URL and a path
    write them, and lose the body if they are redirected.

    It is no `Starlette`, as every streamed token would pass through its error middleware; our routes answer errors.
    No answer refers to the document of the routes if it isn't served.
    """

    def __init__(self, state: ServerState, routes: list[Route], middleware: list[Middleware]) -> None:
        self._state = state
        super().__init__(routes, redirect_slashes=False, middleware=middleware)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, inside the middleware."""
        scope["app"] = self  # without it, starlette answers unknown routes itself, in plain text
        try:
            await super().app(scope, receive, send)
        except HTTPException as error:
            plain = plain_path(scope["path"])
            if error.status_code == 404 and plain != scope["path"]:
                scope["path"] = plain
                await self.app(scope, receive, send)
                return
            is_preflight = any(name == b"access-control-request-method" for name, _ in scope["headers"])
            exchange = HttpExchange(scope, receive, send)
            answer = (
                cors_is_off()
                if error.status_code == 405 and is_preflight
                else self._state.http_error(error, exchange.request_id)
            )
            if answer.code == "not_found" and self._state.config.disable_fastapi_docs:
                answer.message = "No such route"
            await exchange.respond_error(answer)


def make_app(state: ServerState) -> Router:
    """Return the ASGI application for `state`; it answers in every phase of the server."""
    bodiless = (*_BODILESS, *([_TOKENIZER_INFO] if state.config.enable_tokenizer_info_endpoint else []))
    operations = [operation for operation, _ in (*bodiless, *_POSTS)]
    operations.append(Operation("GET", _DOCUMENT, "This document"))
    # The key says whether the model is loaded, since the schemas depend on the model.
    documents: dict[bool, msgspec.Raw] = {}

    async def openapi(state: ServerState, exchange: HttpExchange) -> None:
        is_loaded = state.loaded is not None
        if is_loaded not in documents:
            documents[is_loaded] = msgspec.Raw(openapi_document(operations, state))
        await exchange.respond(documents[is_loaded])

    routes = []
    if not state.config.disable_fastapi_docs:
        routes.append(Route(_DOCUMENT, BodilessEndpoint(_DOCUMENT, state, {"GET": openapi}), methods=["GET"]))
    for path in dict.fromkeys(item.path for item, _ in bodiless):
        by_method = {item.method: handle for item, handle in bodiless if item.path == path}
        routes.append(Route(path, BodilessEndpoint(path, state, by_method), methods=[*by_method]))
    for item, handle in _POSTS:
        assert item.body is not None
        routes.append(Route(item.path, JsonEndpoint(item.path, state, item.body, handle), methods=["POST"]))
    middleware = [Middleware(RequestId, record=state.metrics.record_http, config=state.config)]
    if state.config.root_path:
        middleware.insert(0, Middleware(RootPath, root_path=state.config.root_path))
    if state.config.allowed_origins:  # before the key, which preflights don't have
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=state.config.allowed_origins,
                allow_methods=state.config.allowed_methods,
                allow_headers=state.config.allowed_headers,
                allow_credentials=state.config.allow_credentials,
                expose_headers=("X-Request-Id",),
            )
        )
    if state.config.api_key is not None or state.config.admin_api_key is not None:
        middleware.append(Middleware(BearerAuth, config=state.config))
    return _App(state, routes, middleware)


_DOCUMENT = "/openapi.json"
_FLUSH = "Empty the prefix cache"
_PING = "The same, under SageMaker's name"
_RESPONSE = "/v1/responses/{response_id}"
_BODILESS: tuple[tuple[Operation, BodilessHandler], ...] = (
    (Operation("GET", "/health", "Whether the engine makes progress"), admin_routes.health),
    (Operation("GET", "/ping", _PING), admin_routes.health),
    (Operation("POST", "/ping", _PING), admin_routes.health),
    (Operation("GET", "/ready", "Whether the server accepts new requests"), admin_routes.ready),
    (
        Operation("GET", "/health_generate", "Whether the engine computes: one token, within 20 s"),
        admin_routes.health_generate,
    ),
    (Operation("GET", "/load", "The number of open requests, vLLM's route"), admin_routes.load),
    (Operation("GET", "/v1/loads", "The load of each engine process, SGLang's route", response=Loads), loads),
    (Operation("GET", "/loads", "The same", response=Loads), loads),
    (Operation("GET", "/get_load", "The load of each engine process under SGLang's older keys"), get_load),
    (Operation("GET", "/version", "The version of jaxserve"), admin_routes.version),
    (Operation("GET", "/server_info", "Settings, engine, statistics and their integrity"), admin_routes.server_info),
    (Operation("GET", "/get_server_info", "The same, under SGLang's older name"), admin_routes.server_info),
    (Operation("GET", "/model_info", "The served model, under SGLang's keys"), admin_routes.model_info),
    (Operation("GET", "/get_model_info", "The same, under SGLang's older name"), admin_routes.model_info),
    (Operation("GET", "/metrics", "Prometheus metrics", content_type="text/plain"), admin_routes.metrics),
    (Operation("GET", "/v1/models", "The served models", response=ModelList), list_models),
    (Operation("GET", "/v1/models/{model:path}", "One model", response=ModelCard), get_model),
    (
        Operation("GET", _RESPONSE, "A response that is kept, or is being written", response=ResponseObject),
        get_response,
    ),
    (Operation("DELETE", _RESPONSE, "Forget a response", response=DeletedResponse), delete_response),
    (Operation("POST", f"{_RESPONSE}/cancel", "Abort a response", response=ResponseObject), cancel_response),
    (
        Operation(
            "GET",
            f"{_RESPONSE}/input_items",
            "What a response was an answer to",
            response=InputItemList,
            query={
                "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
                "order": {"enum": ["asc", "desc"], "default": "desc"},
                "after": {"type": "string"},
            },
        ),
        list_input_items,
    ),
    (Operation("GET", "/flush_cache", _FLUSH, content_type="text/plain"), admin_routes.flush_cache),
    (Operation("POST", "/flush_cache", _FLUSH, content_type="text/plain"), admin_routes.flush_cache),
    (Operation("POST", "/reset_prefix_cache", "The same, under vLLM's name"), admin_routes.reset_prefix_cache),
)
_TOKENIZER_INFO = (
    Operation("GET", "/tokenizer_info", "Special tokens and chat template, with `--enable-tokenizer-info-endpoint`"),
    tokenizer_info,
)


def _post[T: msgspec.Struct](
    path: str,
    summary: str,
    handle: JsonHandler[T],
    body: type[T],
    response: type,
    *,
    streams: bool = False,
) -> tuple[Operation, JsonHandler[Any]]:
    return Operation("POST", path, summary, body=body, response=response, streams=streams), handle


_POSTS = (
    _post("/v1/completions", "Continue prompts", completions, CompletionRequest, CompletionResponse, streams=True),
    _post("/v1/chat/completions", "Answer a conversation", chat_completions, ChatRequest, ChatResponse, streams=True),
    _post(
        "/v1/completions/render",
        "The ids of prompts, vLLM's route",
        render_completions,
        CompletionRequest,
        list[RenderedRequest],
    ),
    _post("/v1/chat/completions/render", "The ids of a chat's prompt", render_chat, ChatRequest, RenderedRequest),
    _post(
        "/v1/messages",
        "Answer a conversation, Anthropic's route",
        messages,
        MessagesRequest,
        MessageResponse,
        streams=True,
    ),
    _post("/v1/messages/count_tokens", "Count the tokens of a prompt", count_tokens, CountTokensRequest, TokenCount),
    _post(
        "/v1/responses",
        "Answer a conversation, OpenAI's newer route",
        create_response,
        ResponsesRequest,
        ResponseObject,
        streams=True,
    ),
    _post(
        "/v1/responses/input_tokens",
        "Count the tokens of a prompt",
        count_input_tokens,
        ResponsesInput,
        InputTokenCount,
    ),
    _post("/generate", "Continue prompts, SGLang's own route", generate, GenerateRequest, GenerateOutput, streams=True),
    _post("/v1/embeddings", "Embeddings of texts", embeddings, EmbeddingRequest, EmbeddingResponse),
    _post("/v1/rerank", "The documents that answer a query best", rerank, RerankRequest, RerankResponse),
    _post("/v2/rerank", "The same, under Cohere's newer name", rerank, RerankRequest, RerankResponse),
    _post("/rerank", "The same, under Jina's and vLLM's name", rerank, RerankRequest, RerankResponse),
    _post("/v1/score", "How well texts fit each other, vLLM's route", score, ScoreRequest, ScoreResponse),
    _post("/score", "The same, under vLLM's other name", score, ScoreRequest, ScoreResponse),
    _post("/classify", "Labels of texts, vLLM's route", classify, ClassifyRequest, ClassifyResponse),
    _post("/pooling", "What the model pools from texts, vLLM's route", pooling, PoolingRequest, PoolingResponse),
    _post("/encode", "The same, SGLang's route", encode, EncodeRequest, EncodeOutput),
    _post("/tokenize", "Text to ids", tokenize, TokenizeRequest, TokenizeResponse),
    _post("/detokenize", "Ids to text", detokenize, DetokenizeRequest, DetokenizeResponse),
    _post("/abort_request", "Abort an open request, or all", abort_request, AbortRequest, AbortResponse),
    _post("/start_profile", "Record a profile of the engine", start_profile, StartProfileRequest, ProfileResponse),
    _post("/stop_profile", "End the profile and write it", stop_profile, StopProfileRequest, ProfileResponse),
)
