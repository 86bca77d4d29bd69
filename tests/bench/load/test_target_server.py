from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.bench.load.http_client import ConnectionPool
from jaxserve.bench.load.target_server import (
    TargetServer,
    first_served_model,
    load_named_tokenizer,
    parse_base_url,
    send_request,
    wait_for_server,
)
from jaxserve.errors import ConfigError, JaxserveError
from tests.bench.conftest import Harness
from tests.bench.word_tokenizer import word_tokenizer, write_folder


@pytest.mark.parametrize(
    ("url", "server", "path"),
    [
        ("http://127.0.0.1:8000", TargetServer("127.0.0.1", 8000), "/v1/completions"),
        ("localhost:9", TargetServer("localhost", 9), "/v1/completions"),
        ("https://models.example/v1/", TargetServer("models.example", 443, "/v1", tls=True), "/v1/completions"),
        ("http://h/proxy", TargetServer("h", 80, "/proxy"), "/proxy/v1/completions"),
        ("http://[::1]:8000", TargetServer("::1", 8000), "/v1/completions"),
    ],
)
def test_urls(url: str, server: TargetServer, path: str) -> None:
    assert parse_base_url(url) == server
    assert server.path("/v1/completions") == path
    assert server.path("v1/completions") == path


def test_host_header() -> None:
    assert parse_base_url("http://[::1]:8000/x").authority == "[::1]:8000"


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:99999", "http://x:y"])
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        parse_base_url(url)


async def test_the_model_is_read_from_the_server(harness: Harness) -> None:
    server = TargetServer("127.0.0.1", harness.port)
    pool = server.pool()
    harness.pools.append(pool)
    await wait_for_server(server, pool, patience=0)
    assert (await first_served_model(server, pool, {})).id == "known"
    status, body = await send_request(server, pool, {}, "/nothing")
    assert (status, b"no route" in body) == (404, True)
    with pytest.raises(JaxserveError, match="lists no model at /v1/models"):
        await first_served_model(TargetServer("127.0.0.1", harness.port, "/elsewhere"), pool, {})


async def test_an_unknown_host_name() -> None:
    server = TargetServer("no-such-host.invalid", 1)
    with pytest.raises(JaxserveError, match="the name 'no-such-host"):
        await wait_for_server(server, ConnectionPool(server.host, server.port), patience=0)


def test_a_folder_may_hold_only_a_tokenizer(tmp_path: Path) -> None:
    named = load_named_tokenizer(write_folder(tmp_path))
    assert named.encode(" baba cece") == word_tokenizer().encode(" baba cece")


def test_a_missing_tokenizer_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="no tokenizer for 'known'; name one with --tokenizer"):
        load_named_tokenizer("known")
