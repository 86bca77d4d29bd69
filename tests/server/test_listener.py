from __future__ import annotations

import os
import socket
from pathlib import Path

import httpx
import pytest

from jaxserve.config.server_schema import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.server.listener import listening, url_of
from tests.server.conftest import over_socket


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


async def test_a_server_on_a_path(path: str):
    async with over_socket(uds=path, transport=httpx.AsyncHTTPTransport(uds=path)) as server:
        assert server.url == f"unix:{path}"
        assert (await server.http.get("/version")).status_code == 200
        body = {"prompt": "a", "max_tokens": 3, "stream": True}
        assert "[DONE]" in (await server.http.post("/v1/completions", json=body)).text
        assert (await server.http.get("/" + "x" * 65_000, headers={"a": "x" * 1000})).status_code == 431
    assert not os.path.exists(path)


def test_the_socket_of_a_server_that_was_killed_is_replaced(path: str):
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(path)
        killed.listen()
    assert os.path.exists(path)
    with listening(ServerConfig(uds=path)), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


@pytest.mark.parametrize("backlog", [0, 8])
def test_the_socket_of_a_running_server_is_an_error(path: str, backlog: int):
    with socket.socket(socket.AF_UNIX) as running, socket.socket(socket.AF_UNIX) as waiting:
        running.bind(path)
        running.listen(backlog)
        waiting.connect(path)  # fills a queue without places
        with pytest.raises(ConfigError, match=f"a server listens on --uds {path}"), listening(ServerConfig(uds=path)):
            pass
    assert os.path.exists(path)


def test_a_file_that_is_no_socket_is_kept(path: str):
    Path(path).write_text("precious")
    with (
        pytest.raises(ConfigError, match=f"--uds {path} exists and is not a socket"),
        listening(ServerConfig(uds=path)),
    ):
        pass
    assert Path(path).read_text() == "precious"


def test_the_socket_of_a_later_server_is_kept(path: str):
    with listening(ServerConfig(uds=path)) as listener, socket.socket(socket.AF_UNIX) as later:
        listener.close()
        os.unlink(path)
        later.bind(path)
    assert os.path.exists(path)


@pytest.mark.parametrize("name", ["nothing/here", "x" * 200])
def test_a_path_that_cannot_be_used_is_named(tmp_path: Path, name: str):
    config = ServerConfig(uds=str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"can't listen on --uds .*choose another path"), listening(config):
        pass


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("certificate", [None, "x.pem"])
def test_the_url_of_a_port(host: str, certificate: str | None):
    config = ServerConfig(host=host, port=0, ssl_certfile=certificate)
    with listening(config) as listener:
        scheme, shown = "http" if certificate is None else "https", f"[{host}]" if ":" in host else host
        assert url_of(listener, config) == f"{scheme}://{shown}:{listener.getsockname()[1]}"
