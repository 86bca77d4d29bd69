"""`jaxserve serve` with a node rank above 0: a process without HTTP that runs a follower's engine until it ends.

A signal stops the whole service, since a mesh can't run without one of its processes; so does the end of any other
process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time

from jaxserve import host
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import JaxserveError

logger = logging.getLogger("jaxserve.server")

_ENGINE_STOP_SECONDS = 10.0


def run_follower(config: EngineConfig) -> int:
    """Follow node rank 0 until it ends or a signal arrives. Return the exit code."""
    with asyncio.Runner(loop_factory=host.new_event_loop) as runner:
        return runner.run(_run(config))


async def _run(config: EngineConfig) -> int:
    from jaxserve.engine.client import launch_follower

    started = time.perf_counter()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, stop, number)
    logger.info(
        "Node rank %d of %d, loading %s; node rank 0 answers HTTP", config.node_rank, config.nnodes, config.model
    )
    stopping = asyncio.create_task(stop.wait())
    launching = asyncio.create_task(launch_follower(config))
    await asyncio.wait((launching, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not launching.done():
        logger.info("Stopped while loading")
        launching.cancel()
        await asyncio.gather(launching, return_exceptions=True)
        return 0
    try:
        engine = launching.result()
    except JaxserveError as error:
        logger.error("Can't start: %s", error)
        return 2 if isinstance(error, ValueError) else 1
    logger.info("Ready: following node rank 0, in %.1f s", time.perf_counter() - started)
    await asyncio.wait((engine.ended, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        logger.info("Received a signal to stop: shutting down all nodes")
    await engine.stop(_ENGINE_STOP_SECONDS)
    if engine.exit_code == 0 or stopping.done():
        return 0
    logger.error("The engine has ended: %s", engine.ended.result())
    return 1


def _on_signal(stop: asyncio.Event, number: int) -> None:
    if stop.is_set():
        logger.warning("Second signal: exiting at once")
        os._exit(128 + number)  # the kernel ends the engine with this process
    stop.set()
