"""A connection between two processes of a mesh: frames in order, and certainty within seconds that the other is there.

`send` never waits: what the socket doesn't take at once leaves by a thread, which also reads, says every second that
this process lives, and tells when the other is gone or silent. It works while the main thread hangs in a collective.
"""

from __future__ import annotations

import contextlib
import enum
import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

from jaxserve.errors import EngineDeadError

BEAT = 1.0
"""Seconds between two signs of life."""
SILENCE = 7.0
"""Seconds without any after which the other counts as lost: its machine, its network, or a stopped process."""
SILENCE_AT_START = 60.0
"""The same while it loads and compiles."""

_HEAD = struct.Struct("<BI")
_CHUNK = 1 << 18
_MOST_BYTES = 1 << 30


class Kind(enum.IntEnum):
    """What a frame is: a sign of life, with what there is to say of this process, a farewell, a value that processes
    agree on, a command to the device."""

    BEAT = 0
    FAREWELL = 1
    VALUE = 2
    COMMAND = 3


Frame = tuple[Kind, bytes]


class Link:
    """Takes over a connected socket. `on_lost` is told why, once, and `on_farewell` what the other said, both in the
    link's thread; `lost` is set after that. `news` goes with every sign of life, `heard` is the other's last."""

    def __init__(
        self,
        connected: socket.socket,
        on_lost: Callable[[str], None],
        on_farewell: Callable[[bytes], None],
        news: Callable[[], bytes] = bytes,
    ) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._on_lost = on_lost
        self._on_farewell = on_farewell
        self._news = news
        self.heard = b""
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._inbox: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._waker, self._wake = os.pipe()
        self.silence = SILENCE_AT_START
        self.lost = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxserve-link", daemon=True)

    def start(self) -> None:
        """Begin to read and to watch."""
        self._thread.start()

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Hand a frame over. What can't be sent any more is dropped: `on_lost` tells."""
        frame = _HEAD.pack(kind, len(body)) + body
        with self._lock:
            if self._unsent:
                self._unsent += frame
                return
            try:
                sent = self._socket.send(frame)
            except BlockingIOError:
                sent = 0
            except OSError:
                return
            if sent < len(frame):
                self._unsent += memoryview(frame)[sent:]
                os.write(self._wake, b"\0")

    def receive(self) -> Frame:
        """Wait for the next value or command. Raises `EngineDeadError` when there will be none."""
        frame = self._inbox.get()
        if frame is None:
            raise EngineDeadError("the other process of the mesh is gone")
        return frame

    def _run(self) -> None:
        try:
            why = self._watch()
        except OSError as error:
            why = f"its connection has failed ({error.strerror or error})"
        with contextlib.suppress(OSError):
            self._socket.close()
        self._on_lost(why)
        self.lost.set()
        self._inbox.put(None)

    def _watch(self) -> str:
        """Read and write until the other is lost; why it is."""
        poll = select.poll()
        poll.register(self._waker, select.POLLIN)
        received = bytearray()
        heard = beat = time.monotonic()
        while True:
            writing = select.POLLOUT if self._unsent else 0
            poll.register(self._socket, select.POLLIN | writing)
            ready = dict(poll.poll(max(0.0, beat + BEAT - time.monotonic()) * 1000))
            if self._waker in ready:
                os.read(self._waker, 4096)
            events = ready.get(self._socket.fileno(), 0)
            if events & select.POLLOUT:
                self._flush()
            if events & ~select.POLLOUT:
                part = self._socket.recv(_CHUNK)
                if not part:
                    return "its connection has closed"
                heard = time.monotonic()
                received += part
                if not self._take(received):
                    return "what it sent is no frame"
            now = time.monotonic()
            if now - heard > self.silence:
                return f"nothing was heard from it for {self.silence:g} s"
            if now >= beat + BEAT:
                beat = now
                if not self._unsent:
                    self.send(Kind.BEAT, self._news())

    def _flush(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            sent = self._socket.send(memoryview(self._unsent)[:_CHUNK])
            del self._unsent[:sent]

    def _take(self, received: bytearray) -> bool:
        """Hand on the whole frames of what was received, and leave the rest."""
        while len(received) >= _HEAD.size:
            kind, size = _HEAD.unpack_from(received)
            if kind not in Kind or size > _MOST_BYTES:
                return False
            end = _HEAD.size + size
            if len(received) < end:
                return True
            body = bytes(memoryview(received)[_HEAD.size : end])
            del received[:end]
            if kind == Kind.FAREWELL:
                self._on_farewell(body)
            elif kind == Kind.BEAT:
                self.heard = body
            else:
                self._inbox.put((Kind(kind), body))
        return True
