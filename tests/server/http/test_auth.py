from __future__ import annotations

import httpx
import openai
import pytest

from tests.server.conftest import ServerUnderTest, over_asgi, over_socket

KEY = "sk-тайна"


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/metrics"])
async def test_probes_and_scrapers_need_no_key(path: str):
    async with over_asgi(api_key=KEY) as server:
        assert (await server.http.get(path)).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/models/tiny",
        "/v1/completions",
        "/server_info",
        "/flush_cache",
        "/reset_prefix_cache",
        "/tokenizer_info",
        "/openapi.json",
        "/version",
        "/nothing",
    ],
)
@pytest.mark.parametrize("header", [None, b"Bearer wrong", b"Bearer", b"Basic " + KEY.encode(), KEY.encode(), b"\xff"])
async def test_other_routes_need_the_key(path: str, header: bytes | None):
    async with over_asgi(api_key=KEY) as server:
        headers = [] if header is None else [(b"authorization", header)]
        response = await server.http.get(path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert KEY not in response.text


async def test_the_right_key_is_accepted():
    async with over_asgi(api_key=KEY) as server:
        for scheme in ("Bearer", "bearer"):
            headers = [(b"authorization", f"{scheme} {KEY}".encode())]
            assert (await server.http.get("/v1/models", headers=headers)).status_code == 200


async def test_openai_client():
    async with over_socket(api_key="k1") as live_server:
        async with live_server.openai(api_key="k2") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with live_server.openai(api_key="k1") as client:
            assert (await client.models.list()).data[0].id == "tiny"


async def test_request_ids_are_returned(server: ServerUnderTest):
    given = await server.http.get("/v1/models", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    made = [(await server.http.get("/v1/models")).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    assert all(len(value) == 32 for value in made)
    for response in (await server.http.get("/nothing"), await server.http.post("/v1/completions", content=b"{")):
        assert response.headers["x-request-id"]
    stream = await server.http.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert stream.headers["x-request-id"]


@pytest.mark.parametrize("value", [b"x" * 257, b"a b", "é".encode()])
async def test_a_malformed_request_id_is_replaced(server: ServerUnderTest, value: bytes):
    response = await server.http.get("/v1/models", headers=httpx.Headers([(b"x-request-id", value)]))
    assert response.headers["x-request-id"] != value.decode()
    assert len(response.headers["x-request-id"]) == 32


ADMIN = [
    "/flush_cache",
    "/flush_cache/",
    "//flush_cache",
    "/reset_prefix_cache",
    "/start_profile",
    "/stop_profile",
    "/abort_request",
]


@pytest.mark.parametrize(
    ("keys", "opens_admin", "opens_others"),
    [
        ({"api_key": "k"}, ["k"], ["k"]),
        ({"admin_api_key": "a"}, ["a"], ["a", "k", "same", ""]),
        ({"api_key": "k", "admin_api_key": "a"}, ["a"], ["k"]),
        ({"api_key": "same", "admin_api_key": "same"}, ["same"], ["same"]),
    ],
)
async def test_the_admin_routes_take_the_admin_key_only(
    keys: dict[str, str], opens_admin: list[str], opens_others: list[str]
):
    async with over_asgi(**keys) as server:
        for key in ("a", "k", "same", ""):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            for path in ADMIN:
                answer = await server.http.post(f"http://test{path}", headers=headers, json={})
                assert (answer.status_code != 401) == (key in opens_admin), (path, key)
                if answer.status_code == 401:
                    assert ("wrong admin API key" in answer.text) == ("admin_api_key" in keys)
            for path in ("/v1/models", "/server_info", "/openapi.json", "/nothing"):
                answer = await server.http.get(path, headers=headers)
                assert (answer.status_code != 401) == (key in opens_others), (path, key)
            assert (await server.http.get("/metrics", headers=headers)).status_code == 200


async def test_keys_and_passwords_are_shown_to_nobody():
    secrets = {"api_key": "key-1", "admin_api_key": "key-2", "ssl_keyfile_password": "word-3"}
    async with over_asgi(**secrets, ssl_certfile="x.pem") as server:
        answer = await server.http.get("/server_info", headers={"x-api-key": "key-1"})
        shown = answer.json()["server_config"]
        assert {name: shown[name] for name in secrets} == dict.fromkeys(secrets, "***")
        assert not any(secret in answer.text for secret in secrets.values())
    async with over_asgi() as server:
        assert (await server.http.get("/server_info")).json()["server_config"]["admin_api_key"] is None
