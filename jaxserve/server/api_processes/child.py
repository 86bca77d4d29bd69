"""An API process as the first process of the server sees it: starts it, gives it connections, and notices its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping

from jaxserve.server.api_processes.messages import Channel, Start, ToChild, ToParent

_MODULE = "jaxserve.server.api_processes.worker"


class ApiProcess:
    """A running API process. `ended` resolves with its exit code, or minus the signal that ended it. `last_seen` is
    when it last reported that it answers HTTP, on the loop's clock; 0 before."""

    def __init__(self, index: int, process: subprocess.Popen[bytes], control: Channel[ToChild, ToParent],
                 connections: socket.socket) -> None:  # fmt: skip
        self.index = index
        self.pid = process.pid
        self.last_seen = 0.0
        self.is_ready = self.is_drained = False
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._process = process
        self._control = control
        self._connections = connections
        threading.Thread(
            target=self._watch, args=(asyncio.get_running_loop(),), name=f"jaxserve-api-{index}", daemon=True
        ).start()

    @classmethod
    async def start(cls, order: Start, environment: Mapping[str, str]) -> ApiProcess:
        """Start the process with these variables added to its environment."""
        control, their_control = socket.socketpair()
        connections, their_connections = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with their_control, their_connections:
            given = (their_control.fileno(), their_connections.fileno())
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, *map(str, given)],
                stdin=subprocess.DEVNULL,
                pass_fds=given,
                env=os.environ | environment,
                # Ctrl-C in a terminal signals the foreground group; this child must run until its parent says so.
                process_group=0,
            )
        connections.setblocking(False)
        child = cls(order.index, process, await Channel[ToChild, ToParent].open(ToParent, control), connections)
        child.send(order)
        return child

    def send(self, message: ToChild) -> None:
        """Send a message, which is lost if the process has ended."""
        self._control.send(message)

    async def messages(self) -> AsyncIterator[ToParent]:
        """Yield the messages of the process until it ends."""
        while (message := await self._control.receive()) is not None:
            yield message

    def send_connection(self, connection: socket.socket) -> bool:
        """Send a connection to the process. Return False if it can't be sent now."""
        try:
            socket.send_fds(self._connections, [b"connection"], [connection.fileno()])
        except OSError:  # it has too many that it has not looked at, or has ended
            return False
        return True

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    async def stop(self, timeout: float) -> None:
        """Wait for the end of the process, which was told to end; kill it after `timeout` seconds."""
        try:
            await asyncio.wait_for(asyncio.shield(self.ended), timeout)
        except TimeoutError:
            self.kill()
            await self.ended
        self._control.close()
        self._connections.close()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self.ended.set_result, code)
