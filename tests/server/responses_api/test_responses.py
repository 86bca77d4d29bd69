"""`/v1/responses`: what the engine is asked for, what clients get, and the errors that name a field."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from jaxserve.api_types import StructuredOutputs
from jaxserve.text.grammars.formats import grammar_of
from tests.server.conftest import ServerUnderTest, over_asgi, over_socket
from tests.server.fake_engine import QUEUE_FULL
from tests.server.openai.test_tools import CALL, THINKS, writes
from tests.server.responses_api.ask import PATH, TIME, WEATHER, ask, ask_both_ways, prompt_of, stream, without_names


async def three_steps(server: ServerUnderTest) -> None:
    """Make three steps of an engine that is held, after its request has come."""
    await server.engine.wait_for(lambda: server.engine.num_running == 1)
    for _ in range(3):
        await server.engine.step()


FORM = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
THOUGHT = "<think>\nHm, well.\n</think>\n\n"


async def test_a_text():
    async with over_asgi(THINKS, engine=writes("Hello, you.")) as server:
        response = await ask_both_ways(server, metadata={"a": "b"}, instructions="Be brief.")
        [message] = response["output"]
        assert message["content"] == [{"type": "output_text", "text": "Hello, you.", "annotations": [], "logprobs": []}]
        assert (message["role"], message["status"], response["status"]) == ("assistant", "completed", "completed")
        assert (response["metadata"], response["instructions"]) == ({"a": "b"}, "Be brief.")
        assert prompt_of(server) == "system: Be brief.\nuser: hello\nassistant: "
        assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + len("Hello, you.") + 1


@pytest.mark.parametrize("summary", [None, "auto", "detailed"])
async def test_reasoning_text_and_calls(summary: str | None):
    async with over_asgi(THINKS, engine=writes(f"{THOUGHT}I look.\n{CALL}\n{CALL}")) as server:
        response = await ask_both_ways(server, tools=[WEATHER, TIME], reasoning={"summary": summary})
    reasoning, message, *calls = response["output"]
    if summary is None:
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm, well."}]
        assert reasoning["summary"] == []
    else:
        assert reasoning["summary"] == [{"type": "summary_text", "text": "Hm, well."}]
        assert "content" not in reasoning
    assert "encrypted_content" not in reasoning
    assert message["content"][0]["text"] == "I look."
    assert [(call["type"], call["name"], call["arguments"]) for call in calls] == [
        ("function_call", "weather", '{"city": "Köln"}')
    ] * 2
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len(THOUGHT.rstrip())


async def test_the_end_of_the_limit():
    async with over_asgi(engine=writes("Hello, you.")) as server:
        response = await ask_both_ways(server, max_output_tokens=5)
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["content"][0]["text"] == "Hello"
    assert response["completed_at"] is None


async def test_a_call_that_is_cut_is_incomplete():
    async with over_asgi(engine=writes('<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}')) as server:
        response = await ask_both_ways(server, tools=[WEATHER], tool_choice="required", max_output_tokens=55)
    assert [(item["status"], item["arguments"]) for item in response["output"]] == [("incomplete", '{"city": "')]


async def test_an_empty_answer_is_an_empty_message():
    async with over_asgi(engine=writes("")) as server:
        response = await ask_both_ways(server)
    assert [item["content"][0]["text"] for item in response["output"]] == [""]


async def test_a_limit_beyond_the_context_is_what_it_leaves(server: ServerUnderTest):
    await ask(server, max_output_tokens=10**9)
    await ask(server)
    assert len({request.sampling.max_tokens for request in server.engine.submitted}) == 1


@pytest.mark.parametrize(
    ("given", "form", "field"),
    [
        ({"type": "json_object"}, StructuredOutputs(json_object=True), None),
        ({"type": "json_schema", "name": "f", "schema": FORM}, StructuredOutputs(json=FORM), None),
        ({"type": "json_schema", "schema": FORM, "strict": True}, StructuredOutputs(json=FORM, strict=True), None),
        ({"type": "grammar", "grammar": 'start: "a"'}, StructuredOutputs(grammar='start: "a"'), None),
        ({"type": "json_schema", "name": "f", "schema": {"type": "strange"}}, None, "text.format.schema"),
        ({"type": "grammar", "grammar": "start: nothing"}, None, "text.format.grammar"),
        ({"type": "python"}, None, "text.format.type"),
    ],
)
async def test_forms_of_the_answer(
    server: ServerUnderTest, given: dict[str, Any], form: StructuredOutputs | None, field: str | None
):
    answer = await ask(server, 200 if form else 400, text={"format": given, "verbosity": "low"})
    if form is None:
        assert answer["param"] == field
    else:
        assert server.engine.submitted[0].grammar == grammar_of(form)
        assert answer["text"] == {"format": given, "verbosity": "low"} or given["type"] == "json_schema"


async def test_log_probabilities_are_those_of_the_text():
    async with over_asgi(THINKS, engine=writes(f"{THOUGHT}Hi <to you.")) as server:
        response = await ask(server, top_logprobs=2, tools=[WEATHER])
        events = await stream(server, include=["message.output_text.logprobs"], tools=[WEATHER])
        plain = await ask(server)
    text = response["output"][1]["content"][0]
    assert "".join(entry["token"] for entry in text["logprobs"]).strip() == text["text"] == "Hi <to you."
    assert {len(entry["top_logprobs"]) for entry in text["logprobs"]} == {2}
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    last = events[-1]["response"]["output"][1]["content"][0]["logprobs"]
    assert [entry for event in deltas for entry in event["logprobs"]] == last
    assert [entry["token"] for entry in last] == [entry["token"] for entry in text["logprobs"]]
    assert {len(entry["top_logprobs"]) for entry in last} == {0}
    assert plain["output"][1]["content"][0]["logprobs"] == []


async def test_tokens_of_log_probabilities_may_be_written_as_ids():
    async with over_asgi(engine=writes("Hi."), return_tokens_as_token_ids=True) as server:
        response = await ask_both_ways(server, top_logprobs=1)
    entries = response["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == [f"token_id:{byte}" for byte in b"Hi."]
    assert [one["token"] for entry in entries for one in entry["top_logprobs"]] == [entry["token"] for entry in entries]


@pytest.mark.parametrize(
    ("reasoning", "shown"),
    [({"effort": "none"}, "<think>\n\n</think>"), ({"effort": "high"}, "assistant: "), ({}, "assistant: ")],
)
async def test_effort_turns_reasoning_off(reasoning: dict[str, Any], shown: str):
    async with over_asgi(THINKS, engine=writes("Hi.")) as server:
        await ask(server, reasoning=reasoning)
        assert prompt_of(server).rstrip().endswith(shown.rstrip())


async def test_the_budget_of_thought():
    async with over_asgi(THINKS, engine=writes("Hi."), default_thinking_budget=7) as server:
        for fields in ({}, {"thinking_token_budget": 3}, {"thinking_token_budget": -1}):
            await ask(server, **fields)
    assert [request.thinking and request.thinking.num_tokens for request in server.engine.submitted] == [7, 3, None]


async def test_options_reach_the_engine(server: ServerUnderTest):
    fields = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "seed": 5,
        "stop": ["x"],
        "cache_salt": "s",
        "min_p": 0.125,
    }
    response = await ask(server, **fields)
    [request] = server.engine.submitted
    for name in ("temperature", "top_p", "top_k", "seed", "min_p"):
        assert getattr(request.sampling, name) == fields[name]
    assert request.sampling.stop == ("x",)
    assert (response["temperature"], response["top_p"]) == (0.5, 0.25)


async def test_the_oldest_messages_are_left_out_to_fit():
    history = [
        {"role": role, "content": f"{number} " + "x" * 40} for number in range(6) for role in ("user", "assistant")
    ]
    async with over_asgi(THINKS, engine=writes("Hi.") | {"max_model_len": 300}) as server:
        error = await ask(server, 400, input=[*history, {"role": "user", "content": "now"}])
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
        await ask(server, input=[*history, {"role": "user", "content": "now"}], instructions="Be.", truncation="auto")
        prompt = prompt_of(server)
        assert prompt.startswith("system: Be.\nuser: ")
        assert "0 x" not in prompt
        assert "5 x" in prompt
        assert 100 < len(server.engine.submitted[-1].prompt_ids) <= 225
        error = await ask(server, 400, input="x" * 500, truncation="auto")
        assert error["code"] == "context_length_exceeded"


async def test_truncation_leaves_no_result_without_its_call():
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "' + "x" * 100 + '"}'}
    items = [call, {"type": "function_call_output", "call_id": "c", "output": "RESULT"}]
    items += [{"role": "user", "content": "y" * 100}]
    async with over_asgi(engine=writes("Hi.") | {"max_model_len": 240}) as server:
        await ask(server, input=items, truncation="auto")
        assert "RESULT" not in prompt_of(server)
        assert "y" * 100 in prompt_of(server)


async def test_counting_tokens(server: ServerUnderTest):
    body = {"input": "hello", "instructions": "Be.", "tools": [WEATHER]}
    answer = (await server.http.post(f"{PATH}/input_tokens", json=body)).json()
    await ask(server, **body)
    assert answer == {"object": "response.input_tokens", "input_tokens": len(server.engine.submitted[0].prompt_ids)}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "send a text or a list of items"),
        ({"input": []}, "input", "send a text or a list of items"),
        ({"input": [{"role": "system", "content": "x"}]}, "input", "nothing to answer"),
        ({"input": 5}, "input", ""),
        ({"messages": [{"role": "user"}]}, "messages", "send them as input"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"n": 2}, "n", "several requests"),
        ({"logprobs": True}, "logprobs", "top_logprobs"),
        ({"background": True}, "background", "stream the response"),
        ({"include": ["strange"]}, "include[0]", "strange"),
        ({"stream_options": {}}, "stream_options", "needs stream"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "leave it out"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"stop": ["x"] * 99}, "stop", ""),
        ({"top_logprobs": 21}, "top_logprobs", ""),
        ({"service_tier": "flex"}, "service_tier", "leave it out"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions and input"),
        ({"thinking_token_budget": -2}, "thinking_token_budget", ""),
        ({"chat_template_kwargs": {"mess": 1}}, "chat_template_kwargs.mess", "leave it out"),
    ],
)
async def test_errors_name_the_field(server: ServerUnderTest, fields: dict[str, Any], param: str, words: str):
    error = await ask(server, 400, **fields)
    assert error["param"] == param
    assert words in error["message"]
    assert not server.engine.submitted


async def test_an_unknown_model_is_a_404(server: ServerUnderTest):
    assert (await ask(server, 404, model="gpt-6"))["code"] == "model_not_found"


async def test_a_full_queue_is_a_503_before_any_event():
    async with over_asgi(engine={"refuse": lambda _: QUEUE_FULL}) as server:
        error = await ask(server, 503, stream=True)
    assert error["code"] == "queue_full"


async def test_an_engine_that_dies_fails_the_stream():
    async with over_socket() as server:
        server.engine.hold()
        task = asyncio.create_task(stream(server, store=True))
        await three_steps(server)
        server.engine.die("gone")
        events = await task
        failed = events[-1]
        assert failed["type"] == "response.failed"
        assert failed["response"]["status"] == "failed"
        assert failed["response"]["error"]["code"] == "server_error"
        assert "gone" in failed["response"]["error"]["message"]
        kept = (await server.http.get(f"{PATH}/{failed['response']['id']}")).json()
        assert kept == failed["response"]


async def test_a_stream_that_a_shutdown_ends_has_failed():
    async with over_socket() as server:
        server.engine.hold()
        tasks = [
            asyncio.create_task(server.http.post(PATH, json={"input": "a", "stream": one})) for one in (True, False)
        ]
        await server.engine.wait_for(lambda: server.engine.num_running == 2)
        await server.engine.step()
        server.state.mark_draining()
        server.state.abort_own()
        streamed, whole = await asyncio.gather(*tasks)
        assert "event: response.failed" in streamed.text
        assert (whole.status_code, "shut down" in whole.text) == (503, True)


async def test_a_disconnect_ends_the_request():
    async with over_socket() as server:
        server.engine.hold()
        body = {"input": "hello", "stream": True}
        stepping = asyncio.create_task(three_steps(server))
        async with server.http.stream("POST", PATH, json=body) as answer:
            await anext(answer.aiter_lines())
        await stepping
        await server.engine.wait_for(lambda: bool(server.engine.aborted))
        assert len(server.state.responses) == 0


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("streams", [True, False])
async def test_cancelling_an_open_response(stored: bool, streams: bool):
    async with over_socket() as server:
        server.engine.hold()
        body = {"input": "hello", "stream": streams, "store": stored}
        task = asyncio.create_task(server.http.post(PATH, json=body, headers={"x-request-id": "mine"}))
        await three_steps(server)
        open_one = (await server.http.get(f"{PATH}/resp_mine")).json()
        assert open_one["status"] == "in_progress"
        assert open_one["output"][0]["content"][0]["text"]
        cancelled = await server.http.post(f"{PATH}/resp_mine/cancel")
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
        server.engine.release()
        answer = await task
        last = json.loads(answer.text.rstrip().rpartition("data: ")[2]) if streams else {"response": answer.json()}
        assert last["response"]["status"] == "cancelled"
        assert last.get("type", "response.incomplete") == "response.incomplete"
        again = await server.http.post(f"{PATH}/resp_mine/cancel")
        assert again.status_code == (400 if stored else 404)


async def test_fields_of_the_request_are_in_the_response(server: ServerUnderTest):
    tools = [TIME]
    fields = {"tools": tools, "tool_choice": "auto", "max_output_tokens": 9, "user": "u", "prompt_cache_key": "k"}
    response = await ask(server, **fields, safety_identifier="s", truncation="auto", parallel_tool_calls=False)
    for name, value in fields.items():
        assert response[name] == value
    assert response["parallel_tool_calls"] is False
    assert without_names(response)["object"] == "response"
