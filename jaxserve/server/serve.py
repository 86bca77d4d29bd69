"""`jaxserve serve`: binds the port and runs the server, in one API process or several, until its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from jaxserve import host
from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.errors import JaxserveError
from jaxserve.server.http.tls import make_tls
from jaxserve.server.lifecycle import Lifecycle, log_ready
from jaxserve.server.listener import listening, url_of
from jaxserve.server.loading import ModelLoader, fetch_model, load_model
from jaxserve.server.request_log import RequestLog
from jaxserve.server.server_state import LoadedModel, ServerState

if TYPE_CHECKING:
    from jaxserve.engine.client import Engine

logger = logging.getLogger("jaxserve.server")


def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    load: ModelLoader = load_model,
    engine_module: str = "jaxserve.worker",
) -> int:
    """Serve until a signal or the engine's death, and return the exit code. Raises `ConfigError` if binding fails, or
    if a file of TLS can't be used, or requests can't be logged as the settings say.

    `load` is a function of a module, which every API process calls. Engine processes run `engine_module`.
    """
    make_tls(server_config)  # raises before anything starts
    if server_config.log_requests:
        RequestLog(server_config)  # raises before anything starts, which may be several API processes
    if server_config.ssl_ca_certs is not None and server_config.ssl_cert_reqs == 0:
        logger.warning("--ssl-ca-certs has no effect with --ssl-cert-reqs 0: clients are not asked for certificates")
    # Each text is tokenized by the thread that asks for it: in a shared pool, short texts would wait for long ones.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    async def run(listener: socket.socket) -> int:
        if server_config.api_server_count > 1:
            from jaxserve.server.api_processes.supervisor import Supervisor

            return await Supervisor(engine_config, server_config, listener, _name_of(load), engine_module).run()
        state = ServerState(server_config, engine_config)
        process = _OnlyProcess(state, listener, engine_module)
        logger.info("Listening on %s, loading %s", url_of(listener, server_config), engine_config.model)
        return await Lifecycle(state, process, load, [listener]).run()

    with listening(server_config) as listener, asyncio.Runner(loop_factory=host.new_event_loop) as runner:
        return runner.run(run(listener))


class _OnlyProcess:
    """The role of the only API process: it starts the engine, and signals stop it."""

    def __init__(self, state: ServerState, listener: socket.socket, engine_module: str) -> None:
        self.stop = asyncio.Event()
        self._state = state
        self._listener = listener
        self._engine_module = engine_module
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    async def fetch_model(self) -> None:
        """Fetch the model here once, with a progress bar, before several processes look for it."""
        await fetch_model(self._state.engine_config)

    async def start_engine(self) -> Engine:
        """Start the engine."""
        from jaxserve.engine.client import launch_engine

        return await launch_engine(self._state.engine_config, module=self._engine_module)

    def report_failure(self, error: JaxserveError, exit_code: int) -> None:
        """Log why the server can't start."""
        logger.error("Can't start: %s", error)

    def report_ready(self, loaded: LoadedModel, seconds: float) -> None:
        """Log that requests are served."""
        log_ready(url_of(self._listener, self._state.config), seconds, loaded.engine.info)

    async def finish_drain(self) -> None:
        """Return at once."""

    def _on_signal(self, number: int) -> None:
        if not self.stop.is_set():
            self.stop.set()
            return
        logger.warning("Second signal: exiting at once")
        if self._state.loaded is not None:
            for replica in self._state.loaded.engine.replicas:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(replica.pid, signal.SIGKILL)
        os._exit(128 + number)


def _name_of(load: ModelLoader) -> str:
    """Return the name by which another process imports a function."""
    module = sys.modules[load.__module__]
    name = module.__spec__.name if module.__spec__ is not None else load.__module__
    return f"{name}:{load.__name__}"
