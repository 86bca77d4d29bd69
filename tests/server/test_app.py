"""Routes as clients write them, pages of other origins, and ids of responses."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from jaxserve.config.load import GivenSetting, load_config
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from tests.server.conftest import ServerUnderTest, over_asgi, over_socket
from tests.server.pooling.tasks import EMBED, both

PREFLIGHT = {
    "origin": "https://page.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}
BODY = {"prompt": "a", "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", BODY),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/generate", {"text": "a"}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
async def test_a_priority_on_a_server_without_priorities(path: str, body: dict[str, Any]):
    async with over_asgi(task=both(EMBED), abort_on_priority_when_disabled=True) as server:
        for priority, status in ((0, 503), (3, 503), (None, 200)):
            response = await server.http.post(path, json=body | {"priority": priority})
            assert response.status_code == status, response.text
        assert (await server.http.post(path, json=body | {"priority": 1})).json()["error"]["param"] == "priority"
        server.state.engine_config = EngineConfig(schedule_policy="priority")
        assert (await server.http.post(path, json=body | {"priority": 0})).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions/", "//v1/completions", "/v1//completions//", "///v1///completions"])
async def test_repeated_and_last_slashes_are_ignored(path: str):
    async with over_socket() as server:
        response = await server.http.post(httpx.URL(server.url).copy_with(raw_path=path.encode()), json=BODY)
        assert response.status_code == 200
        assert server.state.metrics.registry.get_sample_value(
            "http_requests_total", {"handler": "/v1/completions", "method": "POST", "status": "2xx"}
        ) in (1.0, None)


async def test_slashes_of_other_routes(server: ServerUnderTest):
    for path in ("/health/", "/v1/models/", "/v1/models//", "/v1/models/tiny/", "//v1/models/tiny"):
        assert (await server.http.get(f"http://test{path}")).status_code == 200, path
    for path in ("/", "//", "/v1/", "/v1/completions/x/", "/v1/models/other/"):
        assert (await server.http.get(f"http://test{path}")).status_code == 404, path
    assert (await server.http.get("http://test/v1/completions/")).status_code == 405


async def test_slashes_open_no_way_around_the_key():
    async with over_asgi(api_key="secret") as server:
        for path in ("//v1/models", "/v1//models", "/v1/models/", "/health//../v1/models", "/health/"):
            assert (await server.http.get(f"http://test{path}")).status_code == 401, path


async def test_pages_of_other_origins_are_refused_with_a_hint(server: ServerUnderTest):
    response = await server.http.options("/v1/completions", headers=PREFLIGHT)
    assert response.status_code == 405
    assert "--allowed-origins" in response.json()["error"]["message"]
    response = await server.http.post("/v1/completions", json=BODY, headers={"origin": "https://page.example"})
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("origins", [("*",), ("https://page.example", "https://other.example")])
async def test_pages_of_allowed_origins(origins: tuple[str, ...]):
    async with over_asgi(allowed_origins=origins, api_key="secret") as server:
        response = await server.http.options("/v1/completions", headers=PREFLIGHT)
        assert response.status_code == 200  # without the key, which preflights don't have
        assert response.headers["access-control-allow-origin"] in ("*", "https://page.example")
        assert "authorization" in response.headers["access-control-allow-headers"]
        headers = {"origin": "https://page.example", "authorization": "Bearer secret"}
        for stream in (False, True):
            response = await server.http.post("/v1/completions", json=BODY | {"stream": stream}, headers=headers)
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] in ("*", "https://page.example")
        # A page can read errors too.
        response = await server.http.post("/v1/completions", json=BODY, headers={"origin": "https://page.example"})
        assert response.status_code == 401
        assert "access-control-allow-origin" in response.headers


async def test_other_origins_methods_and_headers_stay_refused():
    settings = {"allowed_methods": ("POST",), "allowed_headers": ("content-type",), "allow_credentials": True}
    async with over_asgi(allowed_origins=("https://page.example",), **settings) as server:
        wrong = ({"origin": "https://other.example"}, {"access-control-request-method": "DELETE"}, {})
        for change in wrong:
            assert (await server.http.options("/v1/completions", headers=PREFLIGHT | change)).status_code == 400
        right = PREFLIGHT | {"access-control-request-headers": "content-type"}
        response = await server.http.options("/v1/completions", headers=right)
        assert response.status_code == 200
        assert response.headers["access-control-allow-credentials"] == "true"


@pytest.mark.parametrize("written", [["a", "b"], ["a,b"], ['["a", "b"]'], ["['a','b']"], ['["a",', '"b"]']])
def test_origins_are_written_as_a_list(written: list[str]):
    loaded = load_config([GivenSetting("allowed_origins", written, "flag", "--allowed-origins")])
    assert loaded.server.allowed_origins == ("a", "b")


def test_what_pages_may_do_needs_origins():
    with pytest.raises(ConfigError, match="need allowed_origins"):
        load_config([GivenSetting("allow_credentials", True, "flag", "--allow-credentials")])


async def test_ids_of_responses(server: ServerUnderTest):
    header = {"x-request-id": "mine"}
    for path, extra, kind in (
        ("/v1/completions", {"prompt": "a"}, "cmpl-"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "chatcmpl-"),
    ):
        body = extra | {"max_tokens": 1}
        for given, expected in (({}, f"{kind}mine"), ({"request_id": "r"}, f"{kind}r"), ({"rid": "r"}, "r")):
            for _ in range(2):  # ids may be used twice
                response = await server.http.post(path, json=body | given, headers=header)
                assert (response.json()["id"], response.headers["x-request-id"]) == (expected, "mine")
        response = await server.http.post(path, json=body)
        assert response.json()["id"] == kind + response.headers["x-request-id"]
