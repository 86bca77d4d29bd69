from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from jaxserve.bench.load.backends import CHAT, COMPLETIONS, RequestWriter
from jaxserve.bench.load.client import LoadClient
from jaxserve.bench.load.http_client import ConnectionPool
from tests.bench.known_server import KnownServer


class Harness:
    """A known server in this event loop, and clients for it."""

    def __init__(self, server: KnownServer, port: int) -> None:
        self.server, self.port = server, port
        self.pools: list[ConnectionPool] = []

    def client(
        self,
        *,
        chat: bool = False,
        timeout: float = 30.0,
        stall: float = 30.0,
        keep_alive: bool = True,
        **known: object,
    ) -> LoadClient:
        pool = ConnectionPool("127.0.0.1", self.port, keep_alive=keep_alive)
        self.pools.append(pool)
        writer = RequestWriter(
            CHAT if chat else COMPLETIONS, f"127.0.0.1:{self.port}", "known", chat, extra_body={"known": known}
        )
        return LoadClient(pool, writer, timeout=timeout, stall=stall)


@pytest_asyncio.fixture
async def harness() -> AsyncIterator[Harness]:
    """A known server and clients, closed after the test."""
    server = KnownServer()
    made = Harness(server, await server.start())
    yield made
    for pool in made.pools:
        pool.close()
    await server.stop()
