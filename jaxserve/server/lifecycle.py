"""One run of an API process, from the first connection to the exit code.

Owns the order of events: HTTP answers 503 while the model loads, a request to stop drains the open requests, and the
engine's death ends the process with an error. Knows no route, and only by its `ProcessRole` whether the process is
alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any, Protocol, cast

import uvicorn

from jaxserve.api_types import EngineInfo
from jaxserve.errors import JaxserveError
from jaxserve.server.app import make_app
from jaxserve.server.http.connection import HttpConnection
from jaxserve.server.http.tls import make_tls
from jaxserve.server.loading import EngineSource, ModelLoader
from jaxserve.server.server_state import LoadedModel, ServerState

logger = logging.getLogger("jaxserve.server")

# After the engine's death, /health reports the reason for this long before the port closes, so that probes see it.
_SECONDS_UP_AFTER_DEATH = 1.0
# How long responses that are already complete may take to reach slow clients.
FLUSH_SECONDS = 5


class ProcessRole(EngineSource, Protocol):
    """What an API process does differently when it is alone and when it is one of several. `stop` is set when the
    process must drain and end."""

    stop: asyncio.Event

    def report_failure(self, error: JaxserveError, exit_code: int) -> None:
        """Report why the process can't serve."""
        ...

    def report_ready(self, loaded: LoadedModel, seconds: float) -> None:
        """Report that requests are served, `seconds` after the start."""
        ...

    async def finish_drain(self) -> None:
        """Return when the process may close, as no request is open."""
        ...


class HttpServer(uvicorn.Server):
    """uvicorn with limits on what clients send and without its own signal handling, which would close the port: a drain
    must answer new requests with 503. `app` answers the requests."""

    def __init__(self, state: ServerState) -> None:
        self._connection = functools.partial(HttpConnection, state.config)
        self.app = make_app(state)
        super().__init__(
            uvicorn.Config(
                self.app,
                http=cast(type[asyncio.Protocol], self._connection),
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=FLUSH_SECONDS,
            )
        )
        self.tls = make_tls(state.config)
        self._listening_options: dict[str, Any] = {}
        if self.tls is not None:
            timeout = state.config.request_read_timeout
            self._listening_options = {"ssl": self.tls.context, "ssl_handshake_timeout": timeout}
        self.listening = asyncio.Event()
        self._adopting: set[asyncio.Task[object]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve; then `listening` is set."""
        await super().startup([])
        loop = asyncio.get_running_loop()
        for listener in sockets or ():
            self.servers.append(
                await loop.create_server(
                    self._new_connection, sock=listener, backlog=self.config.backlog, **self._listening_options
                )
            )
        self.listening.set()

    def adopt(self, connection: socket.socket) -> None:
        """Serve a connection that another process has accepted."""
        task = asyncio.create_task(self._adopt(connection))
        self._adopting.add(task)
        task.add_done_callback(self._adopting.discard)

    async def _adopt(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # the handshake of TLS has failed
            await loop.connect_accepted_socket(self._new_connection, connection, **self._listening_options)

    def _new_connection(self) -> HttpConnection:
        state = {"server_state": self.server_state, "app_state": self.lifespan.state}
        return self._connection(config=self.config, **state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def log_ready(url: str, seconds: float, info: EngineInfo) -> None:
    """Log that the server at `url` is ready, `seconds` after its start."""
    phases = ", ".join(f"{name} {value:.1f} s" for name, value in info.startup_seconds.items())
    logger.info("Ready: %s in %.1f s%s", url, seconds, f" ({phases})" if phases else "")


class Lifecycle:
    """One run of an API process. It answers on `listeners`, and on connections given to `server.adopt`."""

    def __init__(
        self, state: ServerState, role: ProcessRole, load: ModelLoader, listeners: list[socket.socket]
    ) -> None:
        self._state = state
        self._role = role
        self._load = load
        self._listeners = listeners
        self.server = HttpServer(state)

    async def run(self) -> int:
        """Run the process and return its exit code."""
        started = time.perf_counter()
        http = asyncio.create_task(self.server.serve(self._listeners))
        try:
            return await self._serve(started)
        finally:
            self.server.should_exit = True
            await http
            if self._state.loaded is not None:
                await self._state.loaded.engine.shutdown()
                await self._state.loaded.chat_template.close()
                self._state.loaded.grammars.close()
            state = self._state
            for threads in (state.tokenizer_threads, state.large_tokenizer_threads, state.grammar_threads):
                threads.shutdown(wait=False, cancel_futures=True)

    async def _serve(self, started: float) -> int:
        stopping = asyncio.create_task(self._role.stop.wait())
        loading = asyncio.ensure_future(self._load(self._state.engine_config, self._state.config, self._role))
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            logger.info("Stopped while loading")
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            return 0
        try:
            loaded = loading.result()
        except JaxserveError as error:
            code = 2 if isinstance(error, ValueError) else 1  # as every command: 2 for an error that the user can fix
            self._role.report_failure(error, code)
            return code
        self._state.set_loaded(loaded)
        self._role.report_ready(loaded, time.perf_counter() - started)
        # Objects made at start-up live as long as the process: the garbage collector need not visit them again.
        gc.freeze()
        ticking = asyncio.create_task(self._tick())
        try:
            death = loaded.engine.on_death
            await asyncio.wait((death, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not death.done():
                await self._drain(death)
            if death.done():
                await self._fail_open_requests(death.result())
                return 1
            return 0
        finally:
            ticking.cancel()

    async def _tick(self) -> None:
        while True:
            self._state.metrics.tick()
            self._state.refusals.tick()
            self._state.responses.expire()
            if self.server.tls is not None:
                self.server.tls.refresh()
            await asyncio.sleep(1.0)

    async def _drain(self, death: asyncio.Future[str]) -> None:
        self._state.mark_draining()
        timeout = self._state.config.drain_timeout
        logger.info("Draining: %d open requests have up to %g s to finish", self._state.num_open_requests, timeout)
        idle = asyncio.create_task(self._state.idle.wait())
        await asyncio.wait((idle, death), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not idle.done() and not death.done():
            logger.warning("Drain timeout: aborting %d open requests", self._state.num_open_requests)
            self._state.abort_own()
            await asyncio.wait((idle, death), timeout=FLUSH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        finishing = asyncio.create_task(self._role.finish_drain())
        await asyncio.wait((finishing, death), return_when=asyncio.FIRST_COMPLETED)
        finishing.cancel()

    async def _fail_open_requests(self, reason: str) -> None:
        self._state.mark_dead(reason)
        logger.error("The engine has ended: %s; %d open requests fail", reason, self._state.num_open_requests)
        closing = asyncio.create_task(self._state.idle.wait())
        await asyncio.wait((closing,), timeout=FLUSH_SECONDS)
        closing.cancel()
        await asyncio.sleep(_SECONDS_UP_AFTER_DEATH)
