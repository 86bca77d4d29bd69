"""`jaxserve serve`: one process's life from the bound socket to the exit code.

Owns the order: the port is taken first, HTTP answers (503) while the model loads, a signal drains, the engine's death
ends everything loudly. Knows no route.
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
from pathlib import Path
from typing import cast

import uvicorn

from jaxserve import host
from jaxserve.config.schema import EngineConfig, ServerConfig
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.server.app import make_app
from jaxserve.server.http.connection import Connection
from jaxserve.server.server_state import Loaded, Serving

logger = logging.getLogger("jaxserve.server")

# After the engine's death /health says why for this long before the port closes, so that probes get to see it.
_LAST_WORDS = 1.0
# How long responses that are already complete may take to reach slow clients.
_FLUSH = 5

type Load = Callable[[EngineConfig, ServerConfig], Awaitable[Loaded]]


async def load_model(engine_config: EngineConfig, server_config: ServerConfig) -> Loaded:
    """Starts the engine and reads the tokenizer meanwhile. Raises what either raises, leaving no process."""
    from jaxserve.engine.client import launch_engine
    from jaxserve.model_source import resolve
    from jaxserve.text.chat_template import ChatTemplate
    from jaxserve.text.template_process import TemplateProcess
    from jaxserve.text.tokenizer import load_tokenizer

    # Fetched here, once and with a progress bar, before several processes look for it.
    source = await _in_thread(lambda: resolve(engine_config.model))
    tokenizing = _in_thread(lambda: load_tokenizer(source))
    launching = asyncio.ensure_future(launch_engine(engine_config))
    chat_template = None
    try:
        tokenizer = await tokenizing
        template = tokenizer.chat_template
        if server_config.chat_template is not None:
            template = _read_template(server_config.chat_template)
        ChatTemplate(template, tokenizer.special_tokens)  # raises here if it is none
        chat_template = TemplateProcess(template, tokenizer.special_tokens)
        if template is not None:
            await chat_template.start()
        return Loaded(await launching, tokenizer, chat_template, template or "")
    except BaseException:
        if chat_template is not None:
            await chat_template.close()
        launching.cancel()
        with contextlib.suppress(BaseException):
            await (await launching).shutdown()
        raise


def serve(engine_config: EngineConfig, server_config: ServerConfig, *, load: Load = load_model) -> int:
    """Serves until a signal or the engine's death; the exit code. Raises `ConfigError` if the port can't be had."""
    listener = _bind(server_config)
    # Each text is tokenized by the thread that asks for it: on a pool of threads short ones would wait for long ones.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with asyncio.Runner(loop_factory=host.new_event_loop) as runner:
        return runner.run(_Life(engine_config, server_config, listener, load).run())


class Http(uvicorn.Server):
    """uvicorn, with limits on what clients send, and without its own signal handling: a drain must answer 503 to new
    requests, not close the port."""

    def __init__(self, serving: Serving) -> None:
        connection = functools.partial(Connection, serving.config)
        super().__init__(
            uvicorn.Config(
                make_app(serving),
                http=cast(type[asyncio.Protocol], connection),
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_FLUSH,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Life:
    def __init__(
        self, engine_config: EngineConfig, server_config: ServerConfig, listener: socket.socket, load: Load
    ) -> None:
        self._serving = Serving(server_config, engine_config)
        self._listener = listener
        self._load = load
        self._stop = asyncio.Event()
        self._server = Http(self._serving)

    async def run(self) -> int:
        """The exit code."""
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        http = asyncio.create_task(self._server.serve([self._listener]))
        logger.info("Listening on %s, loading %s", _url(self._listener), self._serving.engine_config.model)
        try:
            return await self._serve(started)
        finally:
            self._server.should_exit = True
            await http
            if self._serving.loaded is not None:
                await self._serving.loaded.engine.shutdown()
                await self._serving.loaded.chat_template.close()
            for threads in (self._serving.tokenizing, self._serving.tokenizing_large):
                threads.shutdown(wait=False, cancel_futures=True)

    async def _serve(self, started: float) -> int:
        stopping = asyncio.create_task(self._stop.wait())
        loading = asyncio.ensure_future(self._load(self._serving.engine_config, self._serving.config))
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
            return 2 if isinstance(error, ValueError) else 1  # as every command: what a person can mend, or not
        self._serving.load(loaded)
        self._say_ready(loaded, time.perf_counter() - started)
        # What start-up made lives as long as the process: the collector need not look at it again.
        gc.freeze()
        ticking = asyncio.create_task(self._tick())
        try:
            death = loaded.engine.on_death
            await asyncio.wait((death, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not death.done():
                await self._drain(death)
            if death.done():
                await self._die(death.result())
                return 1
            return 0
        finally:
            ticking.cancel()

    async def _tick(self) -> None:
        while True:
            self._serving.metrics.tick()
            await asyncio.sleep(1.0)

    def _say_ready(self, loaded: Loaded, seconds: float) -> None:
        phases = ", ".join(f"{name} {value:.1f} s" for name, value in loaded.engine.info.startup_seconds.items())
        logger.info("Ready: %s in %.1f s%s", _url(self._listener), seconds, f" ({phases})" if phases else "")

    async def _drain(self, death: asyncio.Future[str]) -> None:
        self._serving.drain()
        timeout = self._serving.config.drain_timeout
        logger.info("Draining: %d open requests have up to %g s to finish", self._serving.num_open, timeout)
        idle = asyncio.create_task(self._serving.idle.wait())
        await asyncio.wait((idle, death), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not idle.done() and not death.done():
            logger.warning("Drain timeout: aborting %d open requests", self._serving.num_open)
            self._serving.abort_all()
            await asyncio.wait((idle, death), timeout=_FLUSH, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()

    async def _die(self, reason: str) -> None:
        self._serving.die(reason)
        logger.error("The engine has ended: %s; %d open requests fail", reason, self._serving.num_open)
        closing = asyncio.create_task(self._serving.idle.wait())
        await asyncio.wait((closing,), timeout=_FLUSH)
        closing.cancel()
        await asyncio.sleep(_LAST_WORDS)

    def _on_signal(self, number: int) -> None:
        if not self._stop.is_set():
            self._stop.set()
            return
        logger.warning("Second signal: exiting at once")
        if self._serving.loaded is not None:
            for replica in self._serving.loaded.engine.replicas:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(replica.pid, signal.SIGKILL)
        os._exit(128 + number)


def _in_thread[T](work: Callable[[], T]) -> asyncio.Future[T]:
    """`work` in a thread that does not hold up the exit: a signal in the middle of a download must end it."""
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
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever waited
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="load", daemon=True).start()
    return future


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path} can't be read: {error}") from error


def _bind(config: ServerConfig) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {config.host} is no address to listen on: {error}") from error
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
