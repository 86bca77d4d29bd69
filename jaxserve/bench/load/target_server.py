"""The server under test: its address, the name of its model, and small requests to it."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from jaxserve.bench.load.backends import http_message
from jaxserve.bench.load.http_client import BrokenResponseError, ConnectionPool
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.model_source import resolve_tokenizer
from jaxserve.text.tokenizers.tokenizer import Tokenizer, load_tokenizer

_REQUEST_SECONDS = 30.0
_RETRY_SECONDS = 0.25


@dataclasses.dataclass(frozen=True, slots=True)
class TargetServer:
    """A server's address. `prefix` is the path in front of its routes, such as /proxy."""

    host: str
    port: int
    prefix: str = ""
    tls: bool = False

    @property
    def url(self) -> str:
        """The base URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}{self.prefix}"

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        return self.url.split("/")[2]

    def path(self, endpoint: str) -> str:
        """Return the full path of a route; a prefix that ends in /v1 is not repeated."""
        endpoint = f"/{endpoint.lstrip('/')}"
        return f"{self.prefix.removesuffix('/v1') if endpoint.startswith('/v1/') else self.prefix}{endpoint}"

    def pool(self, *, keep_alive: bool = True, insecure: bool = False) -> ConnectionPool:
        """Create a pool of connections to this server; `insecure` accepts any certificate."""
        tls = None
        if self.tls:
            tls = ssl.create_default_context()
            if insecure:
                tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        return ConnectionPool(self.host, self.port, tls, keep_alive=keep_alive)


def parse_base_url(base_url: str, flag: str = "--base-url") -> TargetServer:
    """Parse the URL that `flag` gives. Raises `ConfigError`."""
    parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
    try:
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{flag} {base_url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{flag} {base_url!r} must be like http://127.0.0.1:8000")
    tls = parts.scheme == "https"
    return TargetServer(parts.hostname, port or (443 if tls else 80), parts.path.rstrip("/"), tls)


class ServedModel(msgspec.Struct):
    """An entry of /v1/models; `root` is the folder that vLLM loaded the model from."""

    id: str
    root: str | None = None
    max_model_len: Any = None

    @property
    def context(self) -> int | None:
        """The maximum length of a prompt with its output in tokens; None if the server doesn't say."""
        return self.max_model_len if isinstance(self.max_model_len, int) and self.max_model_len > 0 else None


class _ServedModels(msgspec.Struct):
    data: list[ServedModel]


class _ResponseBody:
    """Collects the status and body of a response."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()

    def begin(self, status: int) -> None:
        self.status = status

    def received(self, body: bytes, when: float) -> None:
        self.body += body


async def wait_for_server(server: TargetServer, pool: ConnectionPool, *, patience: float) -> None:
    """Connect once, retrying for `patience` seconds. Raises `JaxserveError` when nothing listens."""
    deadline = time.perf_counter() + patience
    while True:
        try:
            await pool.connect()
            return
        except BrokenResponseError as error:
            if time.perf_counter() >= deadline:
                raise JaxserveError(f"no server answers at {server.url}: {error}") from error
        await asyncio.sleep(_RETRY_SECONDS)


async def send_request(
    server: TargetServer,
    pool: ConnectionPool,
    headers: Mapping[str, str],
    endpoint: str,
    method: str = "GET",
    body: bytes = b"",
    *,
    seconds: float = _REQUEST_SECONDS,
) -> tuple[int, bytes]:
    """Send a request and return its status and body. Raises `JaxserveError` when it gets no response."""
    response = _ResponseBody()
    text = http_message(method, server.path(endpoint), server.authority, headers, body)
    try:
        await pool.exchange(text, response, deadline=time.perf_counter() + seconds, stall=seconds)
    except BrokenResponseError as error:
        raise JaxserveError(f"{method} {server.url}{endpoint}: {error}") from error
    return response.status, bytes(response.body)


async def first_served_model(server: TargetServer, pool: ConnectionPool, headers: Mapping[str, str]) -> ServedModel:
    """Return the first model of /v1/models. Raises `JaxserveError`."""
    status, body = await send_request(server, pool, headers, "/v1/models")
    models = _read_models(body)
    if status != 200 or not models:
        shown = body[:200].decode(errors="replace")
        raise JaxserveError(
            f"{server.url} lists no model at /v1/models (HTTP {status}: {shown}); name the model with "
            "--model, and give the server's key, if it has one, with --api-key"
        )
    return models[0]


async def find_context(
    server: TargetServer, pool: ConnectionPool, headers: Mapping[str, str], model: str
) -> int | None:
    """Return the context of the model of this name as /v1/models says it; None if it doesn't."""
    try:
        _, body = await send_request(server, pool, headers, "/v1/models")
    except JaxserveError:
        return None
    return next((served.context for served in _read_models(body) if served.id == model), None)


def _read_models(body: bytes) -> list[ServedModel]:
    try:
        return msgspec.json.decode(body, type=_ServedModels).data
    except msgspec.DecodeError:
        return []


def load_named_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer of a local model or a hub id. Raises `ConfigError` that says what to do."""
    try:
        return load_tokenizer(resolve_tokenizer(name))
    except JaxserveError as error:
        raise ConfigError(f"no tokenizer for {name!r}; name one with --tokenizer ({error})") from error


def tokenizer_name(model: str, root: str | None) -> str:
    """Return where to look for the tokenizer: the folder the server loaded if it is on this machine, else the model."""
    return root if root is not None and Path(root).exists() else model
