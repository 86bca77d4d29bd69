"""A served fake engine, in the test's own event loop: over ASGI, or behind a real uvicorn on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from jaxserve.config.schema import EngineConfig, ServerConfig
from jaxserve.server.app import make_app
from jaxserve.server.lifecycle import Http
from jaxserve.server.server_state import Loaded, Serving
from tests.server.fake_engine import FakeEngine
from tests.server.tiny import TEMPLATE, VOCAB_SIZE, TinyTemplate, tiny_tokenizer

MODEL = "tiny"


@dataclass
class Served:
    """A server under test."""

    serving: Serving
    engine: FakeEngine
    http: httpx.AsyncClient
    url: str

    def openai(self, **settings: Any) -> openai.AsyncOpenAI:
        """OpenAI's own client, without retries."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0} | settings)


def new_serving(
    template: str | None = TEMPLATE, *, engine: dict[str, Any] | None = None, **config: Any
) -> tuple[Serving, FakeEngine]:
    """A ready serving over a fake engine."""
    serving = Serving(ServerConfig(served_model_name=MODEL, **config), EngineConfig())
    fake = FakeEngine(VOCAB_SIZE, **(engine or {}))
    tokenizer = tiny_tokenizer(template)
    serving.load(Loaded(fake, tokenizer, TinyTemplate(tokenizer), template or ""))
    return serving, fake


@contextlib.asynccontextmanager
async def over_asgi(*args: Any, **settings: Any) -> AsyncIterator[Served]:
    """No socket: requests go straight to the application."""
    serving, engine = new_serving(*args, **settings)
    transport = httpx.ASGITransport(make_app(serving), raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield Served(serving, engine, client, "http://test")
    await engine.shutdown()
    serving.tokenizing.shutdown()
    serving.tokenizing_large.shutdown()


@contextlib.asynccontextmanager
async def over_socket(*args: Any, **settings: Any) -> AsyncIterator[Served]:
    """A real uvicorn on a free port."""
    serving, engine = new_serving(*args, **settings)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = Http(serving)
    server.config.timeout_graceful_shutdown = 1
    task = asyncio.create_task(server.serve([listener]))
    async with httpx.AsyncClient(base_url=url) as client:
        yield Served(serving, engine, client, url)
    server.should_exit = True
    await task
    await engine.shutdown()
    serving.tokenizing.shutdown()
    serving.tokenizing_large.shutdown()


Start = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with over_asgi() as result:
        yield result


@pytest.fixture
async def live() -> AsyncIterator[Served]:
    async with over_socket() as result:
        yield result
