"""Which server is measured: where it listens, what it calls its model, and whether it answers at all."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from jaxserve.bench.load.backends import message
from jaxserve.bench.load.http_client import BrokenAnswerError, Pool
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.model_source import tokenizer_source
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer

_ASK_SECONDS = 30.0
_BETWEEN_TRIES = 0.25


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """A server's address. `prefix` is the part of the path that its routes stand under."""

    host: str
    port: int
    prefix: str = ""
    tls: bool = False

    @property
    def url(self) -> str:
        """As a person writes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}{self.prefix}"

    @property
    def authority(self) -> str:
        """What the Host header says."""
        return self.url.split("/")[2]

    def path(self, endpoint: str) -> str:
        """The path of a route; /v1 isn't said twice."""
        endpoint = f"/{endpoint.lstrip('/')}"
        return f"{self.prefix.removesuffix('/v1') if endpoint.startswith('/v1/') else self.prefix}{endpoint}"

    def pool(self, *, keep_alive: bool = True, insecure: bool = False) -> Pool:
        """Connections to it; `insecure` takes any certificate."""
        tls = None
        if self.tls:
            tls = ssl.create_default_context()
            if insecure:
                tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        return Pool(self.host, self.port, tls, keep_alive=keep_alive)


def server_at(base_url: str) -> Server:
    """The server a URL means. Raises `ConfigError`."""
    parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
    try:
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--base-url {base_url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--base-url {base_url!r} must be like http://127.0.0.1:8000")
    tls = parts.scheme == "https"
    return Server(parts.hostname, port or (443 if tls else 80), parts.path.rstrip("/"), tls)


class Model(msgspec.Struct):
    """A model's card; `root` is where vLLM loaded it from."""

    id: str
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[Model]


class _Body:
    """Keeps an answer."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()

    def begin(self, status: int) -> None:
        self.status = status

    def received(self, body: bytes, when: float) -> None:
        self.body += body


async def find_server(server: Server, pool: Pool, *, patience: float) -> None:
    """Connect once, trying again for `patience` seconds. Raises `JaxserveError` where nothing listens."""
    deadline = time.perf_counter() + patience
    while True:
        try:
            await pool.find()
            return
        except BrokenAnswerError as error:
            if time.perf_counter() >= deadline:
                raise JaxserveError(f"no server answers at {server.url}: {error}") from error
        await asyncio.sleep(_BETWEEN_TRIES)


async def call(
    server: Server,
    pool: Pool,
    headers: Mapping[str, str],
    endpoint: str,
    method: str = "GET",
    *,
    seconds: float = _ASK_SECONDS,
) -> tuple[int, bytes]:
    """Status and body of a small request. Raises `JaxserveError` where no answer comes."""
    answer = _Body()
    text = message(method, server.path(endpoint), server.authority, headers)
    try:
        await pool.exchange(text, answer, deadline=time.perf_counter() + seconds, stall=seconds)
    except BrokenAnswerError as error:
        raise JaxserveError(f"{method} {server.url}{endpoint}: {error}") from error
    return answer.status, bytes(answer.body)


async def served_model(server: Server, pool: Pool, headers: Mapping[str, str]) -> Model:
    """The first model of /v1/models. Raises `JaxserveError`."""
    status, body = await call(server, pool, headers, "/v1/models")
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except msgspec.DecodeError:
        models = []
    if status != 200 or not models:
        shown = body[:200].decode(errors="replace")
        raise JaxserveError(
            f"{server.url} names no model at /v1/models (HTTP {status}: {shown}); name it with --model, "
            "and its key, if it wants one, with --api-key"
        )
    return models[0]


def tokenizer_named(name: str) -> Tokenizer:
    """The tokenizer of a model here or on the hub. Raises `ConfigError` saying what to do."""
    try:
        return load_tokenizer(tokenizer_source(name))
    except JaxserveError as error:
        raise ConfigError(f"no tokenizer for {name!r}; name one with --tokenizer ({error})") from error


def tokenizer_name(model: str, root: str | None) -> str:
    """What the tokenizer is looked for under: the folder the server loaded, where it is on this machine too."""
    return root if root is not None and Path(root).exists() else model
