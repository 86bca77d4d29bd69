from __future__ import annotations

import asyncio

import pytest

from jaxserve.config.kv_events import KvEventsConfig
from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.server.server_state import ServerState
from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.tiny import TEMPLATE

PROMPT = {"prompt": "a", "max_tokens": 2}


async def test_ready(server: ServerUnderTest):
    assert (await server.http.get("/health")).json() == {"status": "ok"}
    assert (await server.http.get("/ready")).json() == {"status": "ready"}
    for method in ("GET", "POST"):
        assert (await server.http.request(method, "/ping")).json() == {"status": "ok"}


async def test_starting():
    import httpx

    from jaxserve.server.app import make_app

    state = ServerState(ServerConfig(), EngineConfig())
    transport = httpx.ASGITransport(make_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for path in ("/health", "/ping", "/ready"):
            response = await http.get(path)
            assert (response.status_code, response.json()) == (503, {"status": "starting"})
        response = await http.post("/v1/completions", json=PROMPT)
        assert response.status_code == 503
        assert "starting" in response.json()["error"]["message"]
        assert response.headers["retry-after"]
        assert (await http.post("/flush_cache")).status_code == 503
        for path in ("/metrics", "/server_info", "/version", "/v1/models", "/openapi.json"):
            assert (await http.get(path)).status_code == 200, path


async def test_draining_refuses_new_requests_and_finishes_open_ones(server: ServerUnderTest):
    server.engine.hold()
    task = asyncio.ensure_future(server.http.post("/v1/completions", json=PROMPT))
    await server.engine.wait_for(lambda: len(server.engine.submitted) == 1)
    server.state.mark_draining()
    assert (await server.http.get("/health")).status_code == 200
    assert (await server.http.get("/ready")).status_code == 503
    refused = await server.http.post("/v1/completions", json=PROMPT)
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    server.engine.release()
    assert (await task).json()["usage"]["completion_tokens"] == 2


async def test_an_unhealthy_engine_reports_its_reason(server: ServerUnderTest):
    server.engine.health = "no step finished for 300 s"
    for path in ("/health", "/ready"):
        response = await server.http.get(path)
        assert response.status_code == 503
    assert (await server.http.get("/health")).json()["reason"] == "no step finished for 300 s"


async def test_a_dead_engine(server: ServerUnderTest):
    server.engine.die("engine process ended with code -9")
    assert "code -9" in (await server.http.get("/health")).json()["reason"]
    server.state.mark_dead("engine process ended with code -9")
    assert (await server.http.post("/v1/completions", json=PROMPT)).json()["error"]["code"] == "engine_dead"
    for path in ("/metrics", "/server_info", "/v1/models"):
        assert (await server.http.get(path)).status_code == 200


async def test_server_info():
    async with over_asgi(api_key="secret") as server:
        headers = {"authorization": "Bearer secret"}
        server.engine.hold()
        task = asyncio.ensure_future(server.http.post("/v1/completions", json=PROMPT, headers=headers))
        await server.engine.wait_for(lambda: len(server.engine.submitted) == 1)
        response = await server.http.get("/server_info", headers=headers)
        assert "secret" not in response.text
        info = response.json()
        assert info["open_requests"] == 1
        assert info["stats"]["num_running"] == 1
        assert info["stats"]["integrity_errors"] == []
        assert info["stats_are_fresh"] is True
        assert info["engine"]["max_model_len"] == 512
        assert info["engine"]["max_total_num_tokens"] == 1024
        assert info["engine_config"]["page_size"] == 16
        assert info["server_config"]["served_model_name"] == "tiny"
        assert info["phase"] == "ready"
        server.engine.release()
        await task
        assert (await server.http.get("/server_info", headers=headers)).json()["open_requests"] == 0


async def test_server_info_tells_how_the_model_is_divided():
    async with over_asgi() as server:
        server.state.engine_config = EngineConfig(tp_size=4, pp_size=2, dp_size=3, ep_size=2, dp_mode="replicas")
        info = (await server.http.get("/server_info")).json()
    assert {name: info[f"{name}_size"] for name in ("tp", "dp", "pp", "ep")} == {"tp": 4, "dp": 3, "pp": 2, "ep": 2}


async def test_server_info_does_not_tell_the_token_of_the_hub():
    async with over_asgi() as server:
        server.state.engine_config = EngineConfig(hf_token="hf_secret")
        response = await server.http.get("/server_info")
    assert response.json()["engine_config"]["hf_token"] == "***"
    assert "hf_secret" not in response.text


async def test_server_info_tells_routers_where_the_events_of_caches_are():
    async with over_asgi() as server:
        assert "kv_events" not in (await server.http.get("/server_info")).json()
        server.state.engine_config = EngineConfig(kv_events_config=KvEventsConfig(endpoint="tcp://*:6000", topic="kv"))
        info = (await server.http.get("/server_info")).json()
    assert info["engine_config"]["kv_events_config"]["topic"] == "kv"
    assert info["kv_events"] == {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 6000,
        "topic": "kv",
        "block_size": 16,
        "dp_size": 1,
    }


async def test_server_info_does_not_wait_for_a_hung_engine(server: ServerUnderTest):
    async def never(timeout: float) -> None:
        raise TimeoutError

    server.engine.refresh_stats = never
    info = (await server.http.get("/server_info")).json()
    assert info["stats_are_fresh"] is False
    assert info["stats"]["num_pages"] == 64
    assert (await server.http.get("/metrics")).status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_flush_cache(server: ServerUnderTest, method: str):
    answer = await server.http.request(method, "/flush_cache")
    assert (answer.status_code, answer.text) == (200, "Cache flushed: 12 pages given back.\n")
    assert answer.headers["content-type"].startswith("text/plain")
    assert server.engine.num_flushes == 1


async def test_vllms_name_of_flush_cache(server: ServerUnderTest):
    answer = await server.http.post("/reset_prefix_cache?reset_running_requests=false&reset_external=true")
    assert (answer.json(), server.engine.num_flushes) == ({"success": True}, 1)
    refused = await server.http.post("/reset_prefix_cache?reset_running_requests=True")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reset_running_requests")
    assert server.engine.num_flushes == 1


async def test_flush_cache_reports_why_it_failed(server: ServerUnderTest):
    async def never(timeout: float) -> int:
        raise TimeoutError

    flush, server.engine.flush_cache = server.engine.flush_cache, never
    answer = await server.http.post("/flush_cache")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    server.engine.flush_cache = flush
    server.engine.die("engine process ended with code -9")
    answer = await server.http.post("/flush_cache")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
    allowed = (await server.http.put("/flush_cache")).headers["allow"]
    assert set(allowed.split(", ")) == {"GET", "HEAD", "POST"}


async def test_version(server: ServerUnderTest):
    import jaxserve

    assert (await server.http.get("/version")).json() == {"version": jaxserve.__version__}


async def test_tokenizer_info(server: ServerUnderTest):
    assert (await server.http.get("/tokenizer_info")).status_code == 404
    async with over_asgi(enable_tokenizer_info_endpoint=True) as informing:
        assert (await informing.http.get("/tokenizer_info")).json() == {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "model_max_length": 512,
            "added_tokens_decoder": {"256": "<s>", "257": "<|im_start|>", "258": "<|im_end|>"},
            "chat_template": TEMPLATE,
        }
        assert "/tokenizer_info" in (await informing.http.get("/openapi.json")).json()["paths"]


async def test_the_tokenizer_routes(server: ServerUnderTest):
    answer = await server.http.post("/tokenize", json={"prompt": "añ", "return_token_strs": True})
    assert answer.json() == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [97, 195, 177],
        "token_strs": ["a", "bytes:\\xc3", "bytes:\\xb1"],
    }
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    tokens = (await server.http.post("/tokenize", json=chat)).json()["tokens"]
    text = (await server.http.post("/detokenize", json={"tokens": tokens})).json()
    assert text == {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"}
    await server.http.post("/v1/chat/completions", json=chat | {"max_tokens": 1})
    assert server.engine.submitted[0].prompt_ids == tokens
    assert (await server.http.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []
    for body, param in [
        ({}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"promt": "a"}, "promt"),
    ]:
        answer = await server.http.post("/tokenize", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    for tokens in ([-1], [259], [10**30]):
        answer = await server.http.post("/detokenize", json={"tokens": tokens})
        assert answer.status_code == 400
        assert str(tokens[0]) in answer.json()["error"]["message"]
