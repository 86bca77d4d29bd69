"""The application: the table of routes and the few layers around them. Owns no state; `Serving` does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from jaxserve.server.admin import routes as admin
from jaxserve.server.admin.openapi import Operation, document
from jaxserve.server.admin.profile import Profile, StartProfileRequest, StopProfileRequest, start_profile, stop_profile
from jaxserve.server.errors import to_http
from jaxserve.server.http.auth import BearerAuth
from jaxserve.server.http.bodies import Exchange
from jaxserve.server.http.endpoint import Bodiless, Post
from jaxserve.server.http.request_id import RequestId
from jaxserve.server.openai import models, protocol, responses
from jaxserve.server.openai.chat import chat_completions
from jaxserve.server.openai.completions import completions
from jaxserve.server.server_state import Serving
from jaxserve.server.sglang import tokenize
from jaxserve.server.sglang.generate import generate
from jaxserve.server.sglang.generate_protocol import GenerateOutput, GenerateRequest

type BodilessHandler = Callable[[Serving, Exchange], Awaitable[None]]
type PostHandler = Callable[[Serving, Exchange, Any], Coroutine[Any, Any, None]]


class _App(Router):
    """The routes, and answers of ours where none of them takes a request.

    Not a `Starlette`, whose layers for errors, which every route here turns into answers itself, would each hand on
    every token that is streamed.
    """

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, within the layers around the routes."""
        scope["app"] = self  # or starlette answers an unknown route itself, in plain text
        try:
            await super().app(scope, receive, send)
        except HTTPException as error:
            await Exchange(scope, receive, send).fail(to_http(error))


def make_app(serving: Serving) -> Router:
    """The ASGI application that serves `serving`, in whatever phase that is."""
    operations = [operation for operation, _ in (*_BODILESS, *_POSTS)]
    operations.append(Operation("GET", "/openapi.json", "This document"))
    # By whether the model is loaded: then more is known of what requests may hold.
    documents: dict[bool, msgspec.Raw] = {}

    async def openapi(serving: Serving, exchange: Exchange) -> None:
        is_loaded = serving.loaded is not None
        if is_loaded not in documents:
            documents[is_loaded] = msgspec.Raw(document(operations, serving))
        await exchange.respond(documents[is_loaded])

    routes = [Route("/openapi.json", Bodiless(serving, openapi), methods=["GET"])]
    for path, handle_bodiless in {item.path: handle for item, handle in _BODILESS}.items():
        methods = [item.method for item, _ in _BODILESS if item.path == path]
        routes.append(Route(path, Bodiless(serving, handle_bodiless), methods=methods))
    for item, handle in _POSTS:
        assert item.body is not None
        routes.append(Route(item.path, Post(serving, item.body, handle), methods=["POST"]))
    middleware = [Middleware(RequestId)]
    if serving.config.api_key is not None:
        middleware.append(Middleware(BearerAuth, api_key=serving.config.api_key))
    return _App(routes, redirect_slashes=False, middleware=middleware)


_FLUSH = "Empty the prefix cache"
_BODILESS: tuple[tuple[Operation, BodilessHandler], ...] = (
    (Operation("GET", "/health", "Whether the engine makes progress"), admin.health),
    (Operation("GET", "/ready", "Whether new requests are taken"), admin.ready),
    (
        Operation("GET", "/health_generate", "Whether the engine generates: one token, within 20 s"),
        admin.health_generate,
    ),
    (Operation("GET", "/version", "The version of jaxserve"), admin.version),
    (Operation("GET", "/server_info", "Settings, engine, statistics and their integrity"), admin.server_info),
    (Operation("GET", "/get_server_info", "The same, under SGLang's older name"), admin.server_info),
    (Operation("GET", "/model_info", "What is served, under SGLang's keys"), admin.model_info),
    (Operation("GET", "/get_model_info", "The same, under SGLang's older name"), admin.model_info),
    (Operation("GET", "/metrics", "Prometheus metrics", content_type="text/plain"), admin.metrics),
    (Operation("GET", "/v1/models", "Models served", response=responses.ModelList), models.list_models),
    (Operation("GET", "/v1/models/{model:path}", "One model", response=responses.ModelCard), models.get_model),
    (Operation("GET", "/flush_cache", _FLUSH, content_type="text/plain"), admin.flush_cache),
    (Operation("POST", "/flush_cache", _FLUSH, content_type="text/plain"), admin.flush_cache),
)
_POSTS: tuple[tuple[Operation, PostHandler], ...] = (
    (
        Operation(
            *("POST", "/v1/completions", "Continue prompts"),
            body=protocol.CompletionRequest,
            response=responses.CompletionResponse,
            streams=True,
        ),
        completions,
    ),
    (
        Operation(
            *("POST", "/v1/chat/completions", "Answer a conversation"),
            body=protocol.ChatRequest,
            response=responses.ChatResponse,
            streams=True,
        ),
        chat_completions,
    ),
    (
        Operation(
            *("POST", "/generate", "Continue prompts, SGLang's own route"),
            body=GenerateRequest,
            response=GenerateOutput,
            streams=True,
        ),
        generate,
    ),
    (
        Operation(
            "POST", "/tokenize", "Text to ids", body=tokenize.TokenizeRequest, response=tokenize.TokenizeResponse
        ),
        tokenize.tokenize,
    ),
    (
        Operation(
            "POST", "/detokenize", "Ids to text", body=tokenize.DetokenizeRequest, response=tokenize.DetokenizeResponse
        ),
        tokenize.detokenize,
    ),
    (
        Operation(
            "POST",
            "/abort_request",
            "End an open request, or all",
            body=tokenize.AbortRequest,
            response=tokenize.AbortResponse,
        ),
        tokenize.abort_request,
    ),
    (
        Operation(
            "POST", "/start_profile", "Record a profile of the engine", body=StartProfileRequest, response=Profile
        ),
        start_profile,
    ),
    (
        Operation("POST", "/stop_profile", "End the profile and write it", body=StopProfileRequest, response=Profile),
        stop_profile,
    ),
)
