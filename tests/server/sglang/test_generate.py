from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.openai.test_completions import events, letters


async def generate(server: ServerUnderTest, **body: Any) -> Any:
    response = await server.http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_sglangs_shape(server: ServerUnderTest):
    answer = await generate(server, text="hello", sampling_params={"max_new_tokens": 3}, rid="mine")
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert answer == {
        "text": letters("o", 3),
        "output_ids": [ord(char) for char in letters("o", 3)],
        "meta_info": {
            "id": "mine",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "weight_version": "default",
            "cached_tokens": 0,
        },
    }
    async with over_asgi(weight_version="of-today") as other:
        meta = (await generate(other, text="hello"))["meta_info"]
        infos = [(await other.http.get(path)).json() for path in ("/model_info", "/get_model_info", "/server_info")]
    assert [meta["weight_version"], *(info["weight_version"] for info in infos)] == ["of-today"] * 4


async def test_defaults(server: ServerUnderTest):
    answer = await generate(server, input_ids=[97, 98])
    assert answer["meta_info"]["completion_tokens"] == 128
    assert server.engine.submitted[0].prompt_ids == [97, 98]
    assert server.engine.submitted[0].sampling.temperature == 1.0


async def test_a_list_of_prompts_gets_a_list_of_outputs(server: ServerUnderTest):
    one = await generate(server, text=["ab"], sampling_params={"max_new_tokens": 2})
    assert [item["text"] for item in one] == [letters("b", 2)]
    many = await generate(server, input_ids=[[97], [98]], sampling_params={"max_new_tokens": 2, "n": 2}, rid="r")
    assert [item["text"] for item in many] == [letters(c, 2, sample) for c in "ab" for sample in (0, 1)]
    assert [item["meta_info"]["id"] for item in many] == ["r_0", "r_1", "r_2", "r_3"]


async def test_fields_reach_the_engine():
    async with over_asgi(engine={"schedule_policy": "priority"}) as server:
        sampling = {"max_new_tokens": 9, "min_new_tokens": 2, "sampling_seed": 5, "top_k": -1, "no_stop_trim": True}
        await generate(server, text="a", sampling_params=sampling, priority=3, cache_salt="tenant")
        [request] = server.engine.submitted
    assert (request.priority, request.namespace) == (3, "tenant")
    taken = request.sampling
    assert (taken.max_tokens, taken.min_tokens, taken.seed, taken.top_k) == (9, 2, 5, -1)
    assert taken.include_stop_str_in_output


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_and_cached_tokens(stream: bool):
    async with over_asgi(engine={"cached_tokens": 4}) as server:
        whole = letters("a", 10)
        body = {"text": "a", "sampling_params": {"max_new_tokens": 10, "stop": whole[4]}, "stream": stream}
        if stream:
            answer = events(await server.http.post("/generate", json=body))[-1]
        else:
            answer = await generate(server, **body)
    assert answer["text"] == whole[:4]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": whole[4]}
    assert answer["meta_info"]["cached_tokens"] == 4
    assert answer["meta_info"]["completion_tokens"] == 5


async def test_a_stop_id_is_named(server: ServerUnderTest):
    token = ord(letters("a", 3)[2])
    answer = await generate(server, text="a", sampling_params={"stop_token_ids": [token]})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}


async def test_each_event_of_a_stream_has_the_whole_text_so_far(server: ServerUnderTest):
    body = {"text": "a", "sampling_params": {"max_new_tokens": 3}, "stream": True}
    parts = events(await server.http.post("/generate", json=body))
    assert [part["text"] for part in parts] == [letters("a", count) for count in (1, 2, 3)]
    assert [part["meta_info"]["completion_tokens"] for part in parts] == [1, 2, 3]
    assert parts[0]["meta_info"]["finish_reason"] is None
    assert "cached_tokens" not in parts[0]["meta_info"]
    assert parts[-1]["meta_info"]["cached_tokens"] == 0
    assert "index" not in parts[0]
    several = events(await server.http.post("/generate", json=body | {"text": ["a", "b"]}))
    ends = {part["index"]: part["text"] for part in several if part["meta_info"]["finish_reason"]}
    assert ends == {0: letters("a", 3), 1: letters("b", 3)}


async def test_logprobs(server: ServerUnderTest):
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
    answer = await generate(server, **body, logprob_start_len=1, top_logprobs_num=2, return_text_in_logprobs=True)
    meta = answer["meta_info"]
    assert meta["input_token_logprobs"] == [[-0.98, 98, "b"], [-0.99, 99, "c"]]
    tokens = [ord(char) for char in letters("c", 2)]
    assert meta["output_token_logprobs"] == [[-token / 100, token, chr(token)] for token in tokens]
    assert meta["output_top_logprobs"][0] == [
        [-tokens[0] / 100, tokens[0], chr(tokens[0])],
        [-9999.0, tokens[0] + 1, chr(tokens[0] + 1)],
    ]
    assert len(meta["input_top_logprobs"]) == 2
    from_the_start = (await generate(server, **body, logprob_start_len=0))["meta_info"]
    assert from_the_start["input_token_logprobs"][0] == [None, 97, None]
    assert "output_top_logprobs" not in from_the_start
    assert (await generate(server, **body))["meta_info"]["input_token_logprobs"] == []


async def test_a_running_request_can_be_aborted_by_its_rid(server: ServerUnderTest):
    server.engine.hold()
    task = asyncio.ensure_future(generate(server, text="a", rid="mine"))
    await server.engine.wait_for(lambda: server.engine.num_running == 1)
    assert (await server.http.post("/abort_request", json={"rid": "mine"})).json()["aborted"] == 1
    assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_each_prompt_may_have_an_id_of_its_own(server: ServerUnderTest, stream: bool, n: int):
    body = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2, "n": n}, "rid": ["first", "second"]}
    server.engine.hold()
    task = asyncio.ensure_future(server.http.post("/generate", json=body | {"stream": stream}))
    await server.engine.wait_for(lambda: server.engine.num_running == 2 * n)
    assert (await server.http.post("/abort_request", json={"rid": "second"})).json()["aborted"] == n
    assert (await server.http.post("/abort_request", json={"rid": "fir"})).json()["aborted"] == 0
    server.engine.release()
    answer = events(await task) if stream else (await task).json()
    ends = {
        part["meta_info"]["id"]: reason["type"] for part in answer if (reason := part["meta_info"]["finish_reason"])
    }
    names = {1: ("first", "second"), 2: ("first_0", "first_1", "second_0", "second_1")}[n]
    assert ends == {name: "length" if name.startswith("first") else "abort" for name in names}


async def test_each_output_may_be_aborted_by_its_id(server: ServerUnderTest):
    server.engine.hold()
    task = asyncio.ensure_future(generate(server, text=["a", "b", "c"], rid="mine"))
    await server.engine.wait_for(lambda: server.engine.num_running == 3)
    assert (await server.http.post("/abort_request", json={"rid": "mine_1"})).json()["aborted"] == 1
    await server.engine.wait_for(lambda: server.engine.num_running == 2)
    assert (await server.http.post("/abort_request", json={"rid": "mine"})).json()["aborted"] == 2
    assert {item["meta_info"]["finish_reason"]["type"] for item in await task} == {"abort"}
    server.engine.release()
    [single] = await generate(server, text=["a"], rid=["one"], sampling_params={"max_new_tokens": 1})
    assert single["meta_info"]["id"] == "one"
    by_header = await server.http.post("/generate", json={"input_ids": [[97], [98]]}, headers={"x-request-id": "own"})
    assert [item["meta_info"]["id"] for item in by_header.json()] == ["own_0", "own_1"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"text": ["a", "b"], "rid": ["one"]}, "rid", "1 ids for 2 prompts"),
        ({"text": "a", "rid": ["one", "two"]}, "rid", "2 ids for 1 prompts"),
        ({"text": ["a", "b"], "rid": ["one", "one"]}, "rid", "rid has 'one' 2 times: each prompt needs its own id"),
        ({"text": ["a"], "rid": []}, "rid", "rid"),
        ({"text": ["a"], "rid": [""]}, "rid[0]", "rid"),
        ({"text": ["a"], "rid": [1]}, "rid[0]", "rid"),
        ({}, "text", "one of text and input_ids"),
        ({"text": "a", "input_ids": [1]}, "text", "one of"),
        ({"text": ""}, "text", "empty"),
        ({"text": []}, "text", "empty"),
        ({"text": ["a"] * 1025, "sampling_params": {"n": 2}}, "text", "2050 sequences"),
        ({"input_ids": []}, "input_ids", "empty"),
        ({"input_ids": [1, [2]]}, "input_ids", "mixes"),
        ({"input_ids": [10**6]}, "input_ids", "1000000"),
        ({"text": "a", "priority": 1}, "priority", "--schedule-policy priority"),
        ({"text": "a", "top_logprobs_num": 1}, "top_logprobs_num", "return_logprob"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num", "99"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len", "-2"),
        ({"text": "a", "sampling_params": {"min_new_tokens": -1}}, "sampling_params.min_new_tokens", "min_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature", "-1"),
        ({"text": "a", "sampling_params": {"regex": "(a"}}, "sampling_params.regex", "the group at 0 doesn't end"),
        ({"text": "a", "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens", "Unknown"),
        ({"text": "a", "image_data": "x"}, "image_data", "not supported: only null or [] is accepted"),
        ({"text": "a", "picture": "x"}, "picture", "Unknown"),
        ({"text": "a", "sampling_params": {"stop_regex": "("}}, "sampling_params.stop_regex", "regular expression"),
        (
            {"text": "a", "sampling_params": [{"min_new_tokens": 2, "max_new_tokens": 1}]},
            "sampling_params[0].min_new_tokens",
            "got 2",
        ),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params", "2 entries for 1 prompts"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params", "n must be the same"),
    ],
)
async def test_a_wrong_field_is_named(server: ServerUnderTest, body: dict[str, Any], param: str, words: str):
    response = await server.http.post("/generate", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
