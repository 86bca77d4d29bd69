"""Starts and ends the engine processes of a deployment: one, or one per replica, for one API process or several.

It owns the processes, and knows of their messages only how to end them and how to forget a client. Those that talk to
them (`EngineClient`, `Replicas`) may be in other processes: they are given the endpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from jaxserve.config.data_parallel import resolve_dp_mode
from jaxserve.config.device_numbers import on_all_devices
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.client.device_assignment import assign_devices, find_devices
from jaxserve.engine.process.launch_protocol import WHOLE_MACHINE, EngineEndpoint, ReplicaResources
from jaxserve.engine.process.supervisor import EngineProcess
from jaxserve.engine.process.transport import Command, CommandTransport, ForgetClient, Shutdown
from jaxserve.errors import QUEUE_LIMITS, EngineDeadError

logger = logging.getLogger("jaxserve.engine")

WORKER_MODULE = "jaxserve.worker"


class EngineProcesses:
    """The running engine processes of a deployment. `launch` starts them, `shutdown` ends them.

    `on_death` resolves with the reason when one of them ends unexpectedly.
    """

    def __init__(self, processes: Sequence[EngineProcess], endpoints: Sequence[EngineEndpoint]) -> None:
        self.endpoints = tuple(endpoints)
        self.on_death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._processes = tuple(processes)
        self._commands = [CommandTransport(endpoint.command_address) for endpoint in endpoints]
        self._is_closed = False
        for process, endpoint in zip(processes, endpoints):
            process.ended.add_done_callback(functools.partial(self._on_end, endpoint.name))

    @classmethod
    async def launch(
        cls, config: EngineConfig, *, module: str = WORKER_MODULE, num_clients: int = 1
    ) -> EngineProcesses:
        """Start the processes that `--dp-mode` requires, all at once, and wait until they are ready.

        Raise the engine's own `ConfigError` or `ModelNotFoundError`, and `EngineDeadError` for any other failure; then
        no process is left.
        """
        config = resolve_dp_mode(config)
        resources = [WHOLE_MACHINE]
        if config.dp_mode == "replicas":
            resources = assign_devices(config, await find_devices(config), os.environ)
            # Limits of the queue hold for all replicas together: `Replicas` checks them. Each sees its own devices.
            config = on_all_devices(msgspec.structs.replace(config, **dict.fromkeys(QUEUE_LIMITS)))
        for own in resources if config.dp_mode == "replicas" else ():
            given = " ".join(f"{name}={value}" for name, value in own.environment.items())
            logger.info("Starting replica %s of %d, with %s", own.name, len(resources), given)
        starts = [asyncio.ensure_future(_start(config, module, own, num_clients)) for own in resources]
        try:
            started = await asyncio.gather(*starts)
        except BaseException:
            await run_to_completion(_stop_all(starts))
            raise
        return cls(*zip(*started))

    def forget_client(self, client: int) -> None:
        """Abort all requests of an API process that has ended."""
        self._send(ForgetClient(client))

    async def shutdown(self, timeout: float = 10.0) -> None:
        """End all processes, by force after `timeout` seconds."""
        if self._is_closed:
            return
        self._is_closed = True
        self._send(Shutdown())
        await asyncio.gather(*(process.stop(timeout) for process in self._processes))
        for transport in self._commands:
            transport.close()

    def _send(self, command: Command) -> None:
        for process, transport in zip(self._processes, self._commands):
            if not process.ended.done():
                with contextlib.suppress(OSError):
                    transport.send(command)

    def _on_end(self, name: str, ended: asyncio.Future[str]) -> None:
        if not self._is_closed and not self.on_death.done():
            self.on_death.set_result(_named(name, ended.result()))


async def run_to_completion(work: Coroutine[Any, Any, None]) -> None:
    """Finish `work` even if the caller is cancelled meanwhile: an incomplete clean-up would leave a process behind."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


async def _start(
    config: EngineConfig, module: str, resources: ReplicaResources, num_clients: int
) -> tuple[EngineProcess, EngineEndpoint]:
    process = EngineProcess(config, module, resources, num_clients)
    try:
        return process, await process.started()
    except BaseException as error:
        await run_to_completion(process.stop(timeout=0.0))
        if isinstance(error, EngineDeadError):
            raise EngineDeadError(_named(resources.name, str(error))) from error
        raise


async def _stop_all(starts: Sequence[asyncio.Future[tuple[EngineProcess, EngineEndpoint]]]) -> None:
    for start in starts:
        start.cancel()
    for ended in await asyncio.gather(*starts, return_exceptions=True):
        if not isinstance(ended, BaseException):
            await ended[0].stop(timeout=0.0)


def _named(name: str, reason: str) -> str:
    return f"{name}: {reason}" if name else reason
