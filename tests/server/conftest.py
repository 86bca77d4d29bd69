"""A server with a fake engine, in the test's event loop: over ASGI, or as a real uvicorn on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.model_source.pooling import ModelTask
from jaxserve.server.app import make_app
from jaxserve.server.lifecycle import HttpServer
from jaxserve.server.listener import listening, url_of
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.text.answers.formats import choose_formats
from jaxserve.text.grammars.checking import GrammarChecker
from jaxserve.text.template_arguments import default_arguments
from jaxserve.text.tokenizers.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.tiny import TEMPLATE, VOCAB_SIZE, TinyTemplate, tiny_tokenizer

MODEL = "tiny"


@dataclass
class ServerUnderTest:
    """A running server with its fake engine and a client."""

    state: ServerState
    engine: FakeEngine
    http: httpx.AsyncClient
    url: str

    def openai(self, **settings: Any) -> openai.AsyncOpenAI:
        """Return OpenAI's own client, without retries."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0} | settings)


def make_state(
    template: str | None = TEMPLATE,
    *,
    engine: dict[str, Any] | None = None,
    task: ModelTask | None = None,
    tokenizer: Tokenizer | None = None,
    **config: Any,
) -> tuple[ServerState, FakeEngine]:
    """Return the state of a ready server, and its fake engine."""
    state = ServerState(ServerConfig(**{"served_model_name": MODEL} | config), EngineConfig())
    fake = FakeEngine(**{"vocab_size": VOCAB_SIZE} | (engine or {}))
    tokenizer = tokenizer or tiny_tokenizer(template)
    formats = choose_formats(
        template or "", calls=state.config.tool_call_parser, reasoning=state.config.reasoning_parser
    )
    rendering = TinyTemplate(tokenizer, formats.calls.name, state.config.chat_template_content_format)
    grammars, task = GrammarChecker(tokenizer), task or ModelTask()
    defaults = default_arguments(
        state.config.default_chat_template_kwargs, template, reasons=formats.reasoning is not None
    )
    state.set_loaded(
        LoadedModel(fake, tokenizer, rendering, template or "", grammars, formats, task, template_defaults=defaults)
    )
    return state, fake


@contextlib.asynccontextmanager
async def over_asgi(*args: Any, **settings: Any) -> AsyncIterator[ServerUnderTest]:
    """Run a server without a socket: requests go straight to the application."""
    state, engine = make_state(*args, **settings)
    transport = httpx.ASGITransport(make_app(state), raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield ServerUnderTest(state, engine, client, "http://test")
    await engine.shutdown()
    state.tokenizer_threads.shutdown()
    state.large_tokenizer_threads.shutdown()
    state.grammar_threads.shutdown()
    if state.loaded is not None:
        state.loaded.grammars.close()


@contextlib.asynccontextmanager
async def over_socket(
    *args: Any, transport: httpx.AsyncBaseTransport | None = None, **settings: Any
) -> AsyncIterator[ServerUnderTest]:
    """Run a real uvicorn on a free port, or as the settings say."""
    state, engine = make_state(*args, **{"port": 0} | settings)
    with listening(state.config) as listener:
        url = url_of(listener, state.config)
        server = HttpServer(state)
        server.config.timeout_graceful_shutdown = 1
        task = asyncio.create_task(server.serve([listener]))
        base_url = "http://localhost" if url.startswith("unix:") else url
        async with httpx.AsyncClient(base_url=base_url, transport=transport) as client:
            yield ServerUnderTest(state, engine, client, url)
        server.should_exit = True
        await task
    await engine.shutdown()
    state.tokenizer_threads.shutdown()
    state.large_tokenizer_threads.shutdown()
    state.grammar_threads.shutdown()
    if state.loaded is not None:
        state.loaded.grammars.close()


Start = Callable[..., AbstractAsyncContextManager[ServerUnderTest]]


@pytest.fixture
async def server() -> AsyncIterator[ServerUnderTest]:
    async with over_asgi() as result:
        yield result


@pytest.fixture
async def live_server() -> AsyncIterator[ServerUnderTest]:
    async with over_socket() as result:
        yield result
