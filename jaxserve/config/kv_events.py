"""Where and how an engine publishes the events of its prefix caches: the setting `kv_events_config`.

The keys are vLLM's, and SGLang's `bind`. This module reads and checks them; the engine process opens the sockets.
"""

from __future__ import annotations

import re
from typing import Any, Literal, Self

import msgspec

from jaxserve.config.mappings import read_mapping
from jaxserve.config.nearest import nearest
from jaxserve.errors import ConfigError

_NAME = "kv_events_config"
_ENDPOINT = re.compile(r"tcp://(?P<host>\*|\[[^\[\]]+\]|[^:/\[\]*]+):(?P<port>[0-9]{1,5})|ipc://.+")
_ANY_ADDRESS = ("*", "0.0.0.0", "[::]")
_MOST = 2**31 - 1
_LAST_PORT = 65535
_RANGES = {"buffer_steps": (0, _MOST), "hwm": (0, _MOST), "max_queue_size": (1, _MOST)}
_TEXT, _NUMBER, _SWITCH = (str, "text"), (int, "a whole number"), (bool, "true or false")
_KINDS: dict[str, tuple[type, str]] = {
    "enable_kv_cache_events": _SWITCH,
    "publisher": _TEXT,
    "endpoint": _TEXT,
    "replay_endpoint": _TEXT,
    "bind": _SWITCH,
    "buffer_steps": _NUMBER,
    "hwm": _NUMBER,
    "max_queue_size": _NUMBER,
    "topic": _TEXT,
}


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The sockets of each rank, and how much waits in them. Raises `ConfigError` naming the key and the limit.

    Rank 0 publishes at `endpoint` and answers at `replay_endpoint` with the last `buffer_steps` batches; each further
    rank does so at the next port. Without `bind`, a socket at a certain host connects to it, and any other is bound.
    At most `hwm` batches wait for a subscriber, and `max_queue_size` to be published; more are dropped.
    """

    publisher: Literal["zmq"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    bind: bool | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            if not low <= (value := getattr(self, name)) <= high:
                raise ConfigError(f"{_NAME}: {name} must be in [{low}, {high}], got {value}")
        self.check_ranks(1)

    @classmethod
    def read(cls, value: object, place: str) -> Self | None:
        """Return the configuration in a mapping or its JSON, or None if it publishes nothing. Raises `ConfigError`."""
        if isinstance(value, cls):
            return value
        given: dict[str, Any] = {}
        for key, one in read_mapping(value, place, '{"publisher": "zmq", "topic": "kv-events"}').items():
            if key not in _KINDS:
                raise ConfigError(f"{place}: {key} is not a known key{nearest(str(key), _KINDS)}")
            kind, expects = _KINDS[key]
            if one is not None and type(one) is not kind:
                raise ConfigError(f"{place}: {key} must be {expects}, got {one!r}")
            if one is not None:
                given[key] = one
        enabled, publisher = given.pop("enable_kv_cache_events", None), given.pop("publisher", None)
        if publisher not in (None, "null", "zmq"):
            raise ConfigError(f"{place}: publisher must be null or zmq, got {publisher!r}")
        if None not in (enabled, publisher) and enabled != (publisher == "zmq"):
            raise ConfigError(
                f"{place}: enable_kv_cache_events={str(enabled).lower()} and publisher={publisher} contradict each "
                "other; keep one"
            )
        if enabled is None and publisher is None and given:
            raise ConfigError(f"{place}: {', '.join(given)}: nothing is published without publisher=zmq; add it")
        return cls(**given) if enabled or publisher == "zmq" else None

    def check_ranks(self, count: int) -> None:
        """Raise `ConfigError` if `count` ranks can't have sockets of their own."""
        given = {"endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint}
        ports = {key: _port(key, endpoint) for key, endpoint in given.items() if endpoint is not None}
        for key, port in ports.items():
            if port and port + count - 1 > _LAST_PORT:
                raise ConfigError(
                    f"{_NAME}: {key}={given[key]} and {count} ranks, each with the next port, need ports up to "
                    f"{port + count - 1}; the last one is {_LAST_PORT}"
                )
        first, *others = ports.values()
        near = any(first and other and abs(first - other) < count for other in others)
        if self.binds and (near or (self.endpoint == self.replay_endpoint and self.endpoint.startswith("ipc:"))):
            raise ConfigError(
                f"{_NAME}: endpoint={self.endpoint} and replay_endpoint={self.replay_endpoint} collide with {count} "
                f"ranks, of which each takes the next port; set them at least {count} apart"
            )

    @property
    def binds(self) -> bool:
        """Whether the publishing socket is bound, rather than connected to a subscriber."""
        host = _ENDPOINT.fullmatch(self.endpoint)["host"]  # type: ignore[index]
        return self.bind if self.bind is not None else host is None or host in _ANY_ADDRESS

    def for_routers(self, page_size: int, num_ranks: int) -> dict[str, object] | None:
        """Return where to subscribe, under SGLang's keys of /server_info; None for a file or a free port."""
        found = _ENDPOINT.fullmatch(self.endpoint)
        if not self.binds or not (port := _port("endpoint", self.endpoint)):
            return None
        return {
            "publisher": self.publisher,
            "endpoint_host": found["host"],  # type: ignore[index]
            "endpoint_port_base": port,
            "topic": self.topic,
            "block_size": page_size,
            "dp_size": num_ranks,
        }


def at_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of a rank: each has the next port, or a file of its own. Port 0 chooses a free one."""
    if rank == 0:
        return endpoint
    if endpoint.startswith("ipc:"):
        return f"{endpoint}_dp{rank}"
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank if int(port) else 0}"


def _port(key: str, endpoint: str) -> int:
    """Return the port of an endpoint, 0 for a file or a free port. Raise `ConfigError` if it is neither."""
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or int(found["port"] or 0) > _LAST_PORT:
        raise ConfigError(
            f"{_NAME}: {key} must be like tcp://*:5557, tcp://host:5557 or ipc:///folder/file, which other processes "
            f"can reach; got {endpoint!r}"
        )
    return int(found["port"] or 0)
