"""The fields, routes and response keys that gateways and the clients of SGLang and vLLM rely on."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import pytest

from jaxserve.server.app import _POSTS
from jaxserve.server.http import fields
from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.fake_engine import QUEUE_FULL
from tests.server.openai.test_chat import HELLO
from tests.server.openai.test_completions import events, letters
from tests.server.tiny import END_ID

# The fields that sglang-router and vllm-router add to a request without them.
CHAT = {
    "messages": HELLO,
    "model": "tiny",
    **dict.fromkeys(("logprobs", "stream", "no_stop_trim", "ignore_eos", "continue_final_message"), False),
    **dict.fromkeys(("return_hidden_states", "echo"), False),
    **dict.fromkeys(("skip_special_tokens", "separate_reasoning", "stream_reasoning", "include_reasoning"), True),
}
COMPLETION = {
    "prompt": "a",
    "model": "tiny",
    **dict.fromkeys(("stream", "echo", "no_stop_trim", "ignore_eos", "return_hidden_states"), False),
    "skip_special_tokens": True,
}
GENERATE = {
    "text": "a",
    "model": None,
    "log_metrics": True,
    **dict.fromkeys(("return_text_in_logprobs", "stream", "return_hidden_states", "return_routed_experts"), False),
    **dict.fromkeys(("background", "no_logs", "return_bytes", "return_entropy"), False),
}
# smg names no model so.
UNNAMED = {"text": "a", "model": "unknown"}
# A request of SGLang's own tests.
PLAIN = {
    "text": "a",
    "return_logprob": False,
    "top_logprobs_num": 0,
    "logprob_start_len": 0,
    "sampling_params": {"n": 1},
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", COMPLETION),
        ("/generate", GENERATE),
        ("/generate", PLAIN),
        ("/generate", UNNAMED),
        ("/v1/completions", {"prompt": "a", "n": 2, "best_of": 2}),
        ("/v1/completions", {"prompt": "a", "best_of": 1, "n": 2}),
    ],
)
async def test_fields_added_by_gateways_are_accepted(server: ServerUnderTest, path: str, body: dict[str, Any]):
    response = await server.http.post(path, json=body)
    assert response.status_code == 200, response.text


def unsupported_fields() -> list[tuple[str, str, list[object]]]:
    """Return the path, name and accepted values of each unsupported field."""
    bases = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/generate": GENERATE}
    return [
        (item.path, field.encode_name, (meta.extra_json_schema or {})["enum"])
        for item, _ in _POSTS
        if item.path in bases and item.body is not None
        for field, meta in fields._unsupported_fields(item.body)
    ]


async def test_unsupported_fields_accept_only_values_without_an_effect(server: ServerUnderTest):
    bodies = {
        "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
    }
    found = unsupported_fields()
    assert len(found) > 150
    for path, name, accepted in found:
        for value in (None, *accepted):
            response = await server.http.post(path, json=bodies[path] | {name: value})
            assert response.status_code == 200, (path, name, value, response.text)
        for value in (True, False, 0, 1, 7.5, "x", ["x"], {"x": 1}):
            if value in accepted and all(value is not one for one in (True, False, 0, 1)):
                continue
            if any(value == one and type(value) is type(one) for one in accepted):
                continue
            response = await server.http.post(path, json=bodies[path] | {name: value})
            assert response.status_code == 400, (path, name, value)
            error = response.json()["error"]
            assert error["param"] == name
            assert "null" in error["message"]


async def test_unsupported_fields_of_sampling_params(server: ServerUnderTest):
    neutral = {"beam_width": 1, "custom_params": {}, "regex": None, "spaces_between_special_tokens": True}
    response = await server.http.post("/generate", json={"text": "a", "sampling_params": neutral})
    assert response.status_code == 200
    response = await server.http.post("/generate", json={"text": ["a", "b"], "sampling_params": [{}, {"ebnf": "x"}]})
    assert response.json()["error"]["param"] == "sampling_params[1].ebnf"


async def test_sampling_params_of_each_prompt(server: ServerUnderTest):
    sampling = [{"max_new_tokens": 2}, {"max_new_tokens": 3, "temperature": 0}]
    response = await server.http.post("/generate", json={"text": ["a", "k"], "sampling_params": sampling})
    assert [item["text"] for item in response.json()] == [letters("a", 2), letters("k", 3)]
    assert [request.sampling.temperature for request in server.engine.submitted] == [1.0, 0.0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "stop_reason", "matched"),
    [
        ({"stop": "g"}, "g", "g"),
        ({"stop_token_ids": [ord("g")]}, ord("g"), ord("g")),
        ({"stop_regex": ["x+", "[fg]{2}"]}, "[fg]{2}", "[fg]{2}"),
        ({}, None, END_ID),
        ({"max_tokens": 2}, None, None),
    ],
)
async def test_stop_reason_and_matched_stop(body: dict[str, Any], stop_reason: object, matched: object, stream: bool):
    rule = lambda request: itertools.chain(b"cdefghi", [END_ID])  # noqa: E731
    async with over_asgi(engine={"rule": rule}) as server:
        for path, prompt in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HELLO})):
            response = await server.http.post(path, json=prompt | {"max_tokens": 50, "stream": stream} | body)
            if stream:
                chunks = events(response)
                [choice] = chunks[-1]["choices"]
                assert all(chunk["choices"][0].get("matched_stop") is None for chunk in chunks[:-1])
            else:
                [choice] = response.json()["choices"]
            assert (choice["stop_reason"], choice["matched_stop"]) == (stop_reason, matched)
        sampling = {{"max_tokens": "max_new_tokens"}.get(name, name): value for name, value in body.items()}
        answer = (await server.http.post("/generate", json={"text": "a", "sampling_params": sampling})).json()
    reason = answer["meta_info"]["finish_reason"]
    assert reason == ({"type": "length", "length": 2} if matched is None else {"type": "stop", "matched": matched})


@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_a_stop_regex_ends_streamed_and_whole_output_alike(tokens_per_step: int):
    async with over_asgi(engine={"tokens_per_step": tokens_per_step}) as server:
        body = {"prompt": "a", "max_tokens": 30, "stop_regex": "[j-l]{2}m|zzz", "return_token_ids": True}
        whole = (await server.http.post("/v1/completions", json=body)).json()["choices"][0]
        chunks = events(await server.http.post("/v1/completions", json=body | {"stream": True}))
        with_stop = body | {"no_stop_trim": True}
        kept = (await server.http.post("/v1/completions", json=with_stop)).json()["choices"][0]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert "m" not in whole["text"]
    assert kept["text"] == whole["text"] + "klm"


async def test_prompt_ids_of_a_streamed_chat_are_placed_as_in_vllm(server: ServerUnderTest):
    body = {"messages": HELLO, "max_tokens": 3, "n": 2, "return_token_ids": True}
    whole = (await server.http.post("/v1/chat/completions", json=body)).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(await server.http.post("/v1/chat/completions", json=body | options))
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"] == server.engine.submitted[0].prompt_ids
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks if "prompt_token_ids" in chunk] == [
        "assistant"
    ] * 2
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_other_keys_of_messages_reach_the_template():
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}:{{ m.mood }}:{{ m.tool_calls is defined }};{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "hi", "mood": {"deep": [1]}, "nothing": None},
        {"role": "assistant", "content": "ho", "refusal": None, "tool_calls": None, "reasoning_content": "because"},
    ]
    async with over_asgi(template) as server:
        tokens = (await server.http.post("/tokenize", json={"messages": messages})).json()["tokens"]
        text = (await server.http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
        assert text == "user:hi:{'deep': [1]}:False;assistant:ho::False;"
        images = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        refused = await server.http.post("/v1/chat/completions", json={"messages": images})
        assert refused.json()["error"]["param"] == "messages[0].content[0]"


class TestClientIds:
    @pytest.mark.parametrize("name", ["rid", "request_id"])
    async def test_a_client_aborts_its_request_by_its_own_id(self, server: ServerUnderTest, name: str):
        server.engine.hold()
        body = {"prompt": "a", name: "mine"}
        tasks = [asyncio.ensure_future(server.http.post("/v1/completions", json=body)) for _ in range(2)]
        await server.engine.wait_for(lambda: len(server.engine.submitted) == 2)
        answer = await server.http.post("/abort_request", json={"rid": "mine"})
        assert answer.json() == {"rid": "mine", "aborted": 2}
        for task in tasks:
            assert (await task).json()["id"] == {"rid": "mine", "request_id": "cmpl-mine"}[name]

    async def test_abort_all(self, server: ServerUnderTest):
        server.engine.hold()
        body = {"text": ["a", "b"], "sampling_params": {"n": 2}}
        tasks = [asyncio.ensure_future(server.http.post("/generate", json=body)) for _ in range(2)]
        await server.engine.wait_for(lambda: len(server.engine.submitted) == 8)
        answer = await server.http.post("/abort_request", json={"abort_all": True, "rid": ""})
        assert answer.json()["aborted"] == 8
        for task in tasks:
            assert {item["meta_info"]["finish_reason"]["type"] for item in (await task).json()} == {"abort"}
        for nobody in ({}, {"rid": ""}, {"abort_all": False}):
            assert (await server.http.post("/abort_request", json=nobody)).status_code == 400


class TestHealthGenerate:
    async def test_a_token_is_generated_without_counting_a_request(self, server: ServerUnderTest):
        assert (await server.http.get("/health_generate")).json() == {"status": "ok"}
        assert server.engine.stats.generation_tokens == 1
        assert (
            server.state.metrics.registry.get_sample_value(
                "jaxserve:e2e_request_latency_seconds_count", {"model_name": "tiny"}
            )
            == 0
        )

    async def test_a_dead_or_starting_engine(self, server: ServerUnderTest):
        server.engine.die("engine process ended with code -9")
        assert (await server.http.get("/health_generate")).status_code == 503

    async def test_a_hung_engine(self, server: ServerUnderTest, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("jaxserve.server.admin.routes._GENERATE_TIMEOUT", 0.01)
        server.engine.hold()
        response = await server.http.get("/health_generate")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
        assert server.engine.num_running == 0

    async def test_a_full_queue_is_healthy_while_other_requests_get_tokens(self):
        async with over_asgi(engine={"refuse": lambda _: QUEUE_FULL}) as server:
            asking = asyncio.ensure_future(server.http.get("/health_generate"))
            await server.engine.wait_for(lambda: len(server.engine.submitted) == 1)
            server.engine.stats = msgspec.structs.replace(server.engine.stats, generation_tokens=5)
            assert (await asking).status_code == 200


async def test_workers_report_their_properties():
    async with over_asgi(api_key="k") as server:
        for path in ("/get_model_info", "/model_info", "/get_server_info", "/server_info", "/health_generate"):
            assert (await server.http.get(path)).status_code == 401
        headers = {"authorization": "Bearer k"}
        for path in ("/get_model_info", "/model_info"):
            info = (await server.http.get(path, headers=headers)).json()
            assert info["model_path"] == info["tokenizer_path"] == server.state.engine_config.model
            assert info["is_generation"] is True
            assert info["weight_version"] == "default"
            assert info["preferred_sampling_params"] is None
        for path in ("/get_server_info", "/server_info"):
            info = (await server.http.get(path, headers=headers)).json()
            assert (info["tp_size"], info["dp_size"], info["served_model_name"]) == (1, 1, "tiny")
            assert (info["model_id"], info["load_balance_method"]) == ("tiny", "auto")
            assert "model" not in info  # sglang-router reads it as a second `model_id`, and then nothing
            assert info["max_total_tokens"] == 1024
            assert info["internal_states"] == [{"last_gen_throughput": 0.0}]


async def test_an_engine_that_speculates_reports_its_acceptance():
    async with over_asgi() as server:
        figures = {"num_drafts": 10, "draft_tokens": 28, "accepted_tokens": 14, "accepted_by_position": (8, 5, 1)}
        server.engine.stats = msgspec.structs.replace(server.engine.stats, **figures)
        info = (await server.http.get("/server_info")).json()
        assert {name: info["stats"][name] for name in figures} == figures | {"accepted_by_position": [8, 5, 1]}
        assert info["internal_states"][0]["avg_spec_accept_length"] == 2.4
