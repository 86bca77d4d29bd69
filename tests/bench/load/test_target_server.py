from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.bench.load.http_client import Pool
from jaxserve.bench.load.target_server import Server, call, find_server, served_model, server_at, tokenizer_named
from jaxserve.errors import ConfigError, JaxserveError
from tests.bench.conftest import Harness
from tests.bench.word_tokenizer import word_tokenizer, write_folder


@pytest.mark.parametrize(
    ("url", "server", "path"),
    [
        ("http://127.0.0.1:8000", Server("127.0.0.1", 8000), "/v1/completions"),
        ("localhost:9", Server("localhost", 9), "/v1/completions"),
        ("https://models.example/v1/", Server("models.example", 443, "/v1", tls=True), "/v1/completions"),
        ("http://h/proxy", Server("h", 80, "/proxy"), "/proxy/v1/completions"),
        ("http://[::1]:8000", Server("::1", 8000), "/v1/completions"),
    ],
)
def test_urls(url: str, server: Server, path: str) -> None:
    assert server_at(url) == server
    assert server.path("/v1/completions") == path
    assert server.path("v1/completions") == path


def test_what_the_host_header_says() -> None:
    assert server_at("http://[::1]:8000/x").authority == "[::1]:8000"


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:99999", "http://x:y"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        server_at(url)


async def test_the_model_is_asked_for(harness: Harness) -> None:
    server = Server("127.0.0.1", harness.port)
    pool = server.pool()
    harness.pools.append(pool)
    await find_server(server, pool, patience=0)
    assert (await served_model(server, pool, {})).id == "known"
    status, body = await call(server, pool, {}, "/nothing")
    assert (status, b"no route" in body) == (404, True)
    with pytest.raises(JaxserveError, match="names no model at /v1/models"):
        await served_model(Server("127.0.0.1", harness.port, "/elsewhere"), pool, {})


async def test_a_name_nobody_knows() -> None:
    server = Server("no-such-host.invalid", 1)
    with pytest.raises(JaxserveError, match="the name 'no-such-host"):
        await find_server(server, Pool(server.host, server.port), patience=0)


def test_a_folder_may_hold_the_tokenizer_alone(tmp_path: Path) -> None:
    named = tokenizer_named(write_folder(tmp_path))
    assert named.encode(" baba cece") == word_tokenizer().encode(" baba cece")


def test_a_tokenizer_that_is_nowhere_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="no tokenizer for 'known'; name one with --tokenizer"):
        tokenizer_named("known")
