"""Publishes the events of prefix caches on ZeroMQ sockets, with the frames of vLLM 0.32.

Each data-parallel rank has a publisher: a thread that owns its sockets, and a queue to which the engine appends, so
that no subscriber delays a step. A batch has a number; a subscriber that misses one asks for it at the replay endpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator

import msgspec
import zmq

from jaxserve.config.data_parallel import parallelism
from jaxserve.config.kv_events import KvEventsConfig, at_rank
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.kv_cache.cache_events import CacheEvent
from jaxserve.errors import ConfigError

logger = logging.getLogger("jaxserve.engine")

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""The number that ends an answer to a request for batches."""

_NUMBER_BYTES = 8
# Milliseconds that subscribers have to take the last batches after the engine has ended.
_LINGER = 1000
# Bytes of a frame of a request, which is a number.
_MOST_REQUEST_BYTES = 256


class EventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The events of a turn of the engine's loop; `ts` is the time since the epoch in seconds."""

    ts: float
    events: list[CacheEvent]
    data_parallel_rank: int


class CachePublisher:
    """Publishes the events of the cache of one rank. Raises `ConfigError` if a socket can't be opened.

    `endpoints` are the addresses of its sockets: where it publishes and, if there is one, where it answers.
    """

    def __init__(self, config: KvEventsConfig, rank: int) -> None:
        self._rank = rank
        self._topic = config.topic.encode()
        self._numbers = itertools.count()
        self._queue: deque[tuple[int, EventBatch]] = deque()
        self._max_queue_size = config.max_queue_size
        self.num_dropped = 0
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._replies: zmq.Socket[bytes] | None = None
        try:
            self._batches = self._open(zmq.PUB, "endpoint", config.endpoint, config.hwm, bind=config.binds)
            if config.replay_endpoint is not None:
                # A client has room for all batches that are kept and for the end of the answer.
                room = config.buffer_steps + 1
                self._replies = self._open(zmq.ROUTER, "replay_endpoint", config.replay_endpoint, room, bind=True)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        sockets = (self._batches, self._replies)
        self.endpoints = [one.getsockopt_string(zmq.LAST_ENDPOINT) for one in sockets if one is not None]
        self._waker, self._wakes = socket.socketpair()
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"jaxserve-kv-events-{rank}", daemon=True)
        self._thread.start()

    def publish(self, events: list[CacheEvent]) -> None:
        """Publish events as one batch, or drop them if too many batches wait; then subscribers miss its number."""
        number = next(self._numbers)
        if len(self._queue) >= self._max_queue_size:
            if not self.num_dropped:
                logger.warning(
                    "KV events: %d batches wait to be published, so further ones are dropped; raise max_queue_size in "
                    "kv_events_config",
                    self._max_queue_size,
                )
            self.num_dropped += 1
            return
        self._queue.append((number, EventBatch(time.time(), events, self._rank)))
        with contextlib.suppress(BlockingIOError):  # as many wakes wait as fit
            self._waker.send(b"\0")

    def close(self) -> None:
        """Publish what waits and close the sockets."""
        self._waker.close()
        self._thread.join()
        self._context.destroy(linger=_LINGER)
        self._wakes.close()
        if self.num_dropped:
            logger.warning("KV events: %d batches of rank %d were dropped", self.num_dropped, self._rank)

    def _open(self, kind: int, key: str, endpoint: str, room: int, *, bind: bool) -> zmq.Socket[bytes]:
        endpoint = at_rank(endpoint, self._rank)
        one: zmq.Socket[bytes] = self._context.socket(kind)
        one.set_hwm(room)
        if kind == zmq.ROUTER:
            one.maxmsgsize = _MOST_REQUEST_BYTES
        one.ipv6 = "[" in endpoint
        try:
            (one.bind if bind else one.connect)(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kv_events_config: {key} {endpoint} can't be opened: {zmq.strerror(error.errno or 0)}; choose another"
            ) from None
        return one

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakes, zmq.POLLIN)
        if self._replies is not None:
            poller.register(self._replies, zmq.POLLIN)
        is_open = True
        while is_open:
            ready = {one for one, _ in poller.poll()}
            if self._wakes.fileno() in ready:
                is_open = bool(self._wakes.recv(4096))
                self._send_waiting()
            if self._replies in ready:
                self._reply()

    def _send_waiting(self) -> None:
        while self._queue:
            number, batch = self._queue.popleft()
            frames = number.to_bytes(_NUMBER_BYTES, "big"), self._encoder.encode(batch)
            self._batches.send_multipart((self._topic, *frames))
            if self._replies is not None:
                self._sent.append(frames)

    def _reply(self) -> None:
        """Send the kept batches from the requested number on, then the end marker."""
        assert self._replies is not None
        client, *request = self._replies.recv_multipart()
        if len(request) != 2 or len(request[1]) != _NUMBER_BYTES:
            sizes = [len(frame) for frame in request[:4]]
            logger.warning("KV events: a request must be an empty frame and a number of 8 bytes, got sizes %s", sizes)
            return
        for number, payload in self._sent:
            if number >= request[1]:  # big-endian numbers are in the order of their bytes
                self._replies.send_multipart((client, b"", self._topic, number, payload))
        self._replies.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


@contextlib.contextmanager
def open_publishers(config: EngineConfig, replica: int) -> Iterator[tuple[CachePublisher, ...]]:
    """Open a publisher for each rank of an engine process, and close them at the end; none if nothing is published.

    `replica` is the index of the process among replicas. Raises `ConfigError` if a socket can't be opened.
    """
    with contextlib.ExitStack() as stack:
        publishers = []
        if config.kv_events_config is not None:
            for rank in range(replica, replica + parallelism(config).data):
                publishers.append(CachePublisher(config.kv_events_config, rank))
                stack.callback(publishers[-1].close)
                logger.info(
                    "KV events of rank %d are published at %s", rank, ", replayed at ".join(publishers[-1].endpoints)
                )
        yield tuple(publishers)
