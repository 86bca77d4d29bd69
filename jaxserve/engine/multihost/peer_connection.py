"""A connection between two processes of a mesh: it delivers messages in order and detects within seconds that the peer
is gone.

`send` never blocks: a thread sends what the socket doesn't take at once. The same thread reads, sends a heartbeat every
second, and reports a peer that has closed the connection or gone silent. It works while the main thread is blocked in a
collective.
"""

from __future__ import annotations

import contextlib
import enum
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable

from jaxserve.errors import EngineDeadError
from jaxserve.framing import FrameFormat

HEARTBEAT_INTERVAL = 1.0
"""Seconds between two heartbeats."""
SILENCE_TIMEOUT = 7.0
"""Seconds without any byte after which the peer counts as lost: its machine or network is down, or it is stopped."""
STARTUP_SILENCE_TIMEOUT = 60.0
"""The same while the processes load weights and compile, which may let no other thread run."""

_READ_BYTES = 1 << 18


class MessageKind(enum.IntEnum):
    """The kind of a message. A heartbeat holds the sender's status; a value is part of `ProcessGroup.agree`; a command
    is for the device."""

    HEARTBEAT = 0
    EXIT = 1
    VALUE = 2
    COMMAND = 3


_FRAMES = FrameFormat(num_kinds=len(MessageKind), max_bytes=1 << 30)


class PeerConnection:
    """Takes over a connected socket. Both callbacks run in the connection's thread: `on_exit` gets the body of an
    `EXIT` message, `on_lost` is called once, with the reason, and `lost` is set after it returns. Every heartbeat
    carries what `own_status` returns; `peer_status` is the peer's latest."""

    def __init__(
        self,
        connected: socket.socket,
        on_lost: Callable[[str], None],
        on_exit: Callable[[bytes], None],
        own_status: Callable[[], bytes] = bytes,
    ) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._on_lost = on_lost
        self._on_exit = on_exit
        self._own_status = own_status
        self.peer_status = b""
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._inbox: queue.SimpleQueue[tuple[MessageKind, bytes] | None] = queue.SimpleQueue()
        self._wakeup_read, self._wakeup_write = os.pipe()
        self.silence_timeout = STARTUP_SILENCE_TIMEOUT
        self.lost = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxserve-peer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, kind: MessageKind, body: bytes = b"") -> None:
        """Send a message without waiting. It is dropped when the connection has failed, which `on_lost` reports."""
        message = _FRAMES.encode(body, kind)
        with self._lock:
            if self._unsent:
                self._unsent += message
                return
            try:
                sent = self._socket.send(message)
            except BlockingIOError:
                sent = 0
            except OSError:
                return
            if sent < len(message):
                self._unsent += memoryview(message)[sent:]
                os.write(self._wakeup_write, b"\0")

    def receive(self) -> tuple[MessageKind, bytes]:
        """Wait for the next value or command. Raises `EngineDeadError` when the peer is lost."""
        message = self._inbox.get()
        if message is None:
            raise EngineDeadError("the other process of the mesh is gone")
        return message

    def _run(self) -> None:
        try:
            reason = self._exchange_until_lost()
        except OSError as error:
            reason = f"its connection has failed ({error.strerror or error})"
        except ValueError as error:
            reason = f"it sent {error}"
        with contextlib.suppress(OSError):
            self._socket.close()
        self._on_lost(reason)
        self.lost.set()
        self._inbox.put(None)

    def _exchange_until_lost(self) -> str:
        """Read and write until the peer is lost; return why it counts as lost."""
        poll = select.poll()
        poll.register(self._wakeup_read, select.POLLIN)
        received = bytearray()
        last_read = last_heartbeat = time.monotonic()
        while True:
            writing = select.POLLOUT if self._unsent else 0
            poll.register(self._socket, select.POLLIN | writing)
            ready = dict(poll.poll(max(0.0, last_heartbeat + HEARTBEAT_INTERVAL - time.monotonic()) * 1000))
            if self._wakeup_read in ready:
                os.read(self._wakeup_read, 4096)
            events = ready.get(self._socket.fileno(), 0)
            if events & select.POLLOUT:
                self._send_unsent()
            if events & ~select.POLLOUT:
                part = self._socket.recv(_READ_BYTES)
                if not part:
                    return "its connection has closed"
                last_read = time.monotonic()
                received += part
                self._dispatch(received)
            now = time.monotonic()
            if now - last_read > self.silence_timeout:
                return f"nothing was heard from it for {self.silence_timeout:g} s"
            if now >= last_heartbeat + HEARTBEAT_INTERVAL:
                last_heartbeat = now
                if not self._unsent:
                    self.send(MessageKind.HEARTBEAT, self._own_status())

    def _send_unsent(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            sent = self._socket.send(memoryview(self._unsent)[:_READ_BYTES])
            del self._unsent[:sent]

    def _dispatch(self, received: bytearray) -> None:
        """Remove every whole message from `received` and handle it."""
        while (frame := _FRAMES.take(received)) is not None:
            kind, body = frame
            if kind == MessageKind.EXIT:
                self._on_exit(body)
            elif kind == MessageKind.HEARTBEAT:
                self.peer_status = body
            else:
                self._inbox.put((MessageKind(kind), body))
