"""`jaxserve serve`: runs one server process from the bound socket to the exit code.

Owns the order of events: the port is bound first, HTTP answers 503 while the model loads, a signal drains the open
requests, and the engine's death ends the process with an error. Knows no route.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import cast

import uvicorn

from jaxserve import host
from jaxserve.config.schema import EngineConfig, ServerConfig
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.server.app import make_app
from jaxserve.server.http.connection import HttpConnection
from jaxserve.server.server_state import LoadedModel, ServerState

logger = logging.getLogger("jaxserve.server")

# After the engine's death, /health reports the reason for this long before the port closes, so that probes see it.
_SECONDS_UP_AFTER_DEATH = 1.0
# How long responses that are already complete may take to reach slow clients.
_FLUSH_SECONDS = 5

type ModelLoader = Callable[[EngineConfig, ServerConfig], Awaitable[LoadedModel]]


async def load_model(engine_config: EngineConfig, server_config: ServerConfig) -> LoadedModel:
    """Start the engine and meanwhile read the tokenizer. If either raises, end both and raise its error."""
    from jaxserve.engine.client import launch_engine
    from jaxserve.model_source import resolve
    from jaxserve.text.answers.formats import choose_formats
    from jaxserve.text.chat_template import ChatTemplate
    from jaxserve.text.grammars.checking import GrammarChecker
    from jaxserve.text.template_process import TemplateProcess
    from jaxserve.text.tokenizers.chat_template_files import choose_chat_template
    from jaxserve.text.tokenizers.tokenizer import load_tokenizer

    # Fetched here once, with a progress bar, before several processes look for it.
    source = await _run_in_thread(lambda: resolve(engine_config.model))
    loading_tokenizer = _run_in_thread(lambda: load_tokenizer(source))
    launching = asyncio.ensure_future(launch_engine(engine_config))
    chat_template = None
    try:
        tokenizer = await loading_tokenizer
        template = choose_chat_template(server_config.chat_template, tokenizer.chat_templates)
        ChatTemplate(template, tokenizer.special_tokens)  # raises if the template is not valid
        formats = choose_formats(
            template or "", calls=server_config.tool_call_parser, reasoning=server_config.reasoning_parser
        )
        chat_template = TemplateProcess(template, tokenizer.special_tokens, formats.calls.name)
        if template is not None:
            await chat_template.start()
            tokenizer = tokenizer.with_turn_end(await chat_template.turn_end())
        reasoning = "none" if formats.reasoning is None else formats.reasoning.name
        logger.info("calls of tools are read as %s, reasoning as %s", formats.calls.name, reasoning)
        grammars = GrammarChecker(tokenizer)
        loaded = LoadedModel(await launching, tokenizer, chat_template, template or "", grammars, formats)
        if server_config.escape_marks:
            await _run_in_thread(lambda: loaded.escaped_marks)
        return loaded
    except BaseException:
        if chat_template is not None:
            await chat_template.close()
        launching.cancel()
        with contextlib.suppress(BaseException):
            await (await launching).shutdown()
        raise


def serve(engine_config: EngineConfig, server_config: ServerConfig, *, load: ModelLoader = load_model) -> int:
    """Serve until a signal or the engine's death, and return the exit code. Raises `ConfigError` if binding fails."""
    listener = _bind(server_config)
    # Each text is tokenized by the thread that asks for it: in a shared pool, short texts would wait for long ones.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with asyncio.Runner(loop_factory=host.new_event_loop) as runner:
        return runner.run(_Lifecycle(engine_config, server_config, listener, load).run())


class HttpServer(uvicorn.Server):
    """uvicorn with limits on what clients send and without its own signal handling, which would close the port: a drain
    must answer new requests with 503."""

    def __init__(self, state: ServerState) -> None:
        connection = functools.partial(HttpConnection, state.config)
        super().__init__(
            uvicorn.Config(
                make_app(state),
                http=cast(type[asyncio.Protocol], connection),
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_FLUSH_SECONDS,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Lifecycle:
    """One run of the server, from loading the model to the exit code."""

    def __init__(
        self, engine_config: EngineConfig, server_config: ServerConfig, listener: socket.socket, load: ModelLoader
    ) -> None:
        self._state = ServerState(server_config, engine_config)
        self._listener = listener
        self._load = load
        self._stop = asyncio.Event()
        self._server = HttpServer(self._state)

    async def run(self) -> int:
        """Run the server and return the exit code."""
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        http = asyncio.create_task(self._server.serve([self._listener]))
        logger.info("Listening on %s, loading %s", _url(self._listener), self._state.engine_config.model)
        try:
            return await self._serve(started)
        finally:
            self._server.should_exit = True
            await http
            if self._state.loaded is not None:
                await self._state.loaded.engine.shutdown()
                await self._state.loaded.chat_template.close()
                self._state.loaded.grammars.close()
            state = self._state
            for threads in (state.tokenizer_threads, state.large_tokenizer_threads, state.grammar_threads):
                threads.shutdown(wait=False, cancel_futures=True)

    async def _serve(self, started: float) -> int:
        stopping = asyncio.create_task(self._stop.wait())
        loading = asyncio.ensure_future(self._load(self._state.engine_config, self._state.config))
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            logger.info("Stopped while loading")
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            return 0
        try:
            loaded = loading.result()
        except JaxserveError as error:
            logger.error("Can't start: %s", error)
            return 2 if isinstance(error, ValueError) else 1  # as every command: 2 for an error that the user can fix
        self._state.set_loaded(loaded)
        self._log_ready(loaded, time.perf_counter() - started)
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
            await asyncio.sleep(1.0)

    def _log_ready(self, loaded: LoadedModel, seconds: float) -> None:
        phases = ", ".join(f"{name} {value:.1f} s" for name, value in loaded.engine.info.startup_seconds.items())
        logger.info("Ready: %s in %.1f s%s", _url(self._listener), seconds, f" ({phases})" if phases else "")

    async def _drain(self, death: asyncio.Future[str]) -> None:
        self._state.mark_draining()
        timeout = self._state.config.drain_timeout
        logger.info("Draining: %d open requests have up to %g s to finish", self._state.num_open_requests, timeout)
        idle = asyncio.create_task(self._state.idle.wait())
        await asyncio.wait((idle, death), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not idle.done() and not death.done():
            logger.warning("Drain timeout: aborting %d open requests", self._state.num_open_requests)
            self._state.abort_all()
            await asyncio.wait((idle, death), timeout=_FLUSH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()

    async def _fail_open_requests(self, reason: str) -> None:
        self._state.mark_dead(reason)
        logger.error("The engine has ended: %s; %d open requests fail", reason, self._state.num_open_requests)
        closing = asyncio.create_task(self._state.idle.wait())
        await asyncio.wait((closing,), timeout=_FLUSH_SECONDS)
        closing.cancel()
        await asyncio.sleep(_SECONDS_UP_AFTER_DEATH)

    def _on_signal(self, number: int) -> None:
        if not self._stop.is_set():
            self._stop.set()
            return
        logger.warning("Second signal: exiting at once")
        if self._state.loaded is not None:
            for replica in self._state.loaded.engine.replicas:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(replica.pid, signal.SIGKILL)
        os._exit(128 + number)


def _run_in_thread[T](work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work` in a daemon thread, which does not delay the exit: a signal must be able to end a download."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits for the result
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="load", daemon=True).start()
    return future


def _bind(config: ServerConfig) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {config.host} is not an address to listen on: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"can't listen on {config.host}:{config.port}: {error}; choose another with --host or --port"
        ) from error
    listener.setblocking(False)
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
