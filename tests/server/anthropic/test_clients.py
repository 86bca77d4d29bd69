"""Anthropic's own client against a fake engine: answers, streams, tool loops, ends, errors, aborts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import anthropic
import pydantic
import pytest

from jaxserve.api_types import EngineRequest
from tests.server.anthropic.test_messages import HELLO, TIME, WEATHER, ask
from tests.server.conftest import ServerUnderTest, over_asgi, over_socket
from tests.server.fake_engine import QUEUE_FULL
from tests.server.openai.test_tools import CALL, SCHEMA, THINKS, writes
from tests.server.tiny import END_ID, TEMPLATE, tiny_tokenizer

TOOLS = [WEATHER, TIME]
CITY = {"city": "Köln"}


class City(pydantic.BaseModel):
    """A form of an answer."""

    city: str


def writes_in_turn(*texts: str) -> dict[str, Any]:
    """Return the settings of an engine that answers each request with the next text."""
    rest = iter(texts)

    def rule(request: EngineRequest) -> Iterable[int]:
        return [*next(rest).encode(), END_ID]

    return {"rule": rule, "max_model_len": 2048}


def client_of(server: ServerUnderTest, **settings: Any) -> anthropic.AsyncAnthropic:
    """Return Anthropic's own client, without retries."""
    return anthropic.AsyncAnthropic(base_url=server.url, **{"api_key": "none", "max_retries": 0} | settings)


async def in_thread[T](server: ServerUnderTest, use: Callable[[anthropic.Anthropic], T]) -> T:
    """Return what the blocking client gets."""

    def run() -> T:
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            return use(client)

    return await asyncio.to_thread(run)


def asked(**fields: Any) -> Any:
    return {"model": "tiny", "max_tokens": 400, "messages": HELLO} | fields


def prompt_of(server: ServerUnderTest, number: int = -1) -> str:
    return tiny_tokenizer().decode(server.engine.submitted[number].prompt_ids)


@pytest.mark.parametrize("api", ["messages", "beta"])
async def test_the_blocking_client(api: str):
    def use(client: anthropic.Anthropic) -> list[Any]:
        messages: Any = client.messages if api == "messages" else client.beta.messages
        whole = messages.create(**asked())
        with messages.create(**asked(stream=True)) as raw:
            kinds = [event.type for event in raw]
        with messages.stream(**asked()) as stream:
            texts = "".join(stream.text_stream)
            final = stream.get_final_message()
        counted = messages.count_tokens(model="tiny", messages=HELLO)
        return [whole, kinds, texts, final, counted.input_tokens]

    async with over_socket(engine=writes("Hello, you.")) as server:
        whole, kinds, texts, final, counted = await in_thread(server, use)
    assert whole.content[0].text == texts == final.content[0].text == "Hello, you."
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert final.usage.output_tokens == whole.usage.output_tokens == 12
    assert counted == whole.usage.input_tokens


@pytest.mark.parametrize("api", ["messages", "beta"])
async def test_the_asynchronous_client(api: str):
    text = f"<think>Hm.</think>\n\nI look.\n{CALL}\n{CALL}"
    async with over_socket(template=THINKS, engine=writes(text)) as server, client_of(server) as client:
        messages: Any = client.messages if api == "messages" else client.beta.messages
        whole = await messages.create(**asked(tools=TOOLS))
        names, inputs = [], []
        async with messages.stream(**asked(tools=TOOLS)) as stream:
            async for event in stream:
                names.append(event.type)
                if event.type == "input_json":
                    inputs.append(event.snapshot)
            final = await stream.get_final_message()
        counted = await messages.count_tokens(model="tiny", messages=HELLO, tools=TOOLS)
    for message in (whole, final):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        thinking, text, first, second = message.content
        assert thinking.thinking == "Hm."
        assert thinking.signature
        assert text.text == "I look."
        assert first.input == second.input == CITY
        assert first.id != second.id
        assert first.id.startswith("toolu_")
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens_details.thinking_tokens == len("<think>Hm.</think>")
    assert whole.content[0].signature == final.content[0].signature
    assert {"thinking", "signature", "text", "input_json", "content_block_stop"} <= {*names}
    assert inputs[-1] == CITY
    assert counted.input_tokens == whole.usage.input_tokens


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("", []),
        ("<think>Hm.</think>", ["thinking"]),
        ("<think>Hm", ["thinking"]),
        (CALL, ["tool_use"]),
        (f"<think>Hm.</think>\n\n{CALL}", ["thinking", "tool_use"]),
        (CALL.replace('{"city": "Köln"}', "{}"), ["tool_use"]),
    ],
)
async def test_answers_of_some_parts(text: str, kinds: list[str]):
    async with over_socket(template=THINKS, engine=writes(text)) as server, client_of(server) as client:
        whole = await client.messages.create(**asked(tools=TOOLS))
        async with client.messages.stream(**asked(tools=TOOLS)) as stream:
            final = await stream.get_final_message()
    for message in (whole, final):
        assert [block.type for block in message.content] == kinds
        assert message.stop_reason == ("tool_use" if "tool_use" in kinds else "end_turn")


async def test_a_tool_loop_of_several_turns():
    """What the client got goes back as it is; each prompt begins with the one before."""
    template = (
        "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}"
        "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: <think>{% endif %}{# </think> #}"
    )
    texts = [f"First.</think>\n\nI look.\n{CALL}\n{CALL}", f"Again.</think>\n\n{CALL}", "Done.</think>\n\nIt rains."]
    async with over_socket(template=template, engine=writes_in_turn(*texts)) as server, client_of(server) as client:
        messages = [*HELLO]
        for turn in range(3):
            async with client.messages.stream(**asked(messages=messages, tools=TOOLS)) as stream:
                answer = await stream.get_final_message()
            if turn == 1:  # both ways in which people send an answer back
                messages.append(answer.to_param())
            else:
                messages.append({"role": "assistant", "content": answer.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "no net", "is_error": turn == 1}
                for block in answer.content
                if block.type == "tool_use"
            ]
            if results:
                messages.append({"role": "user", "content": results})
    assert answer.stop_reason == "end_turn"
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[1].text == "It rains."
    first, second, third = (prompt_of(server, number) for number in range(3))
    assert second.startswith(first.removesuffix("assistant: <think>"))
    assert third.startswith(second.removesuffix("assistant: <think>"))
    assert "assistant: (First.) I look." in third
    assert third.count("no net") == 3
    assert third.count("Error: no net") == 1


async def test_a_body_as_coding_agents_send_it():
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": CITY, "caller": {"type": "direct"}}
    body = asked(
        max_tokens=32_000,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.3; cch=00000;"},
            {"type": "text", "text": "You are an agent.", **cached},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>a</system-reminder>"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, call]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [], **cached}]},
        ],
        tools=[{**WEATHER, "eager_input_streaming": True, **cached}],
        metadata={"user_id": "user_1"},
        thinking={"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "drop_block"}},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        temperature=1,
    )
    async with over_asgi(engine=writes("ok")) as server:
        answer = await server.http.post("/v1/messages?beta=true", json=body, headers={"anthropic-beta": "a,b"})
        assert answer.status_code == 200, answer.text
        counted = await server.http.post(
            "/v1/messages/count_tokens?beta=true",
            json={name: body[name] for name in ("messages", "system", "tools", "thinking", "output_config")},
        )
        prompt = prompt_of(server)
    assert counted.json()["input_tokens"] == answer.json()["usage"]["input_tokens"]
    assert "billing" not in prompt
    assert "You are an agent." in prompt


ALTERNATES = (
    "{% for m in messages if m.role != 'system' %}{% if (m.role in ('user', 'tool')) != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}{# tool_calls #}{% endif %}"
)


@pytest.mark.parametrize("template", [TEMPLATE, ALTERNATES])
async def test_texts_beside_results_fit_any_template(template: str):
    """Claude Code adds reminders to the results of tools."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": CITY}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
    first, last = {"type": "text", "text": "first"}, {"type": "text", "text": "last"}
    turns = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [first, result, last]}]
    async with over_asgi(template=template, engine=writes("ok")) as server:
        await ask(server, messages=turns)
        prompt = prompt_of(server)
    words = [prompt.index(word) for word in ("first", "rain", "last")]
    assert words == sorted(words)
    assert ("first\n\nrain\n\nlast" in prompt) == (template == ALTERNATES)


async def test_two_system_prompts_are_one():
    async with over_asgi(engine=writes("ok")) as server:
        await ask(server, system="first", messages=[{"role": "system", "content": "second"}, *HELLO])
        assert prompt_of(server).count("system\n") == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_the_clients_tool_runner(streams: bool):
    """It asks the server to hold the conversation first, and sends all of it once that is refused."""
    seen = []

    def weather(city: str) -> str:
        """Say the weather of a city."""
        seen.append(city)
        if len(seen) == 2:
            raise ValueError("no net")
        return "rain"

    def use(client: anthropic.Anthropic) -> list[Any]:
        runner = client.beta.messages.tool_runner(**asked(tools=[anthropic.beta_tool(weather)], stream=streams))
        return [turn.get_final_message() if streams else turn for turn in runner]

    async with over_socket(engine=writes_in_turn(CALL, CALL, "It rains.")) as server:
        answers = await in_thread(server, use)
    assert [answer.stop_reason for answer in answers] == ["tool_use", "tool_use", "end_turn"]
    assert answers[-1].content[0].text == "It rains."
    assert seen == ["Köln", "Köln"]
    assert "rain" in prompt_of(server)
    assert "no net" in prompt_of(server)


async def test_forms_of_answers():
    async with over_socket(engine=writes('{"city": "Köln"}')) as server:
        async with client_of(server) as client:
            for messages in (client.messages, client.beta.messages):
                parsed: Any = await messages.parse(**asked(output_format=City))
                assert parsed.parsed_output == City(city="Köln")
                async with messages.stream(**asked(output_format=City)) as stream:
                    final: Any = await stream.get_final_message()
                assert final.parsed_output == City(city="Köln")
            config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
            await client.messages.create(**asked(output_config=config))
        assert all("city" in request.grammar for request in server.engine.submitted)


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"max_tokens": 0}, "max_tokens", None),
        ({"max_tokens": 20_000}, "model_context_window_exceeded", None),
        ({"stop_sequences": ["zz", " tw"]}, "stop_sequence", " tw"),
    ],
)
async def test_reasons_of_the_end(fields: dict[str, Any], reason: str, sequence: str | None):
    engine = writes("one two" * 20) | {"max_model_len": 64}
    async with over_socket(engine=engine) as server, client_of(server) as client:
        whole = await client.messages.create(**asked(**fields))
        async with client.messages.stream(**asked(**fields)) as stream:
            final = await stream.get_final_message()
    for message in (whole, final):
        assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


async def test_a_call_that_was_cut_goes_back():
    cut = CALL[: CALL.index("ln")]
    fields: Any = {"tools": TOOLS, "tool_choice": {"type": "any"}, "max_tokens": len(cut.encode())}
    async with over_socket(engine=writes(cut)) as server, client_of(server) as client:
        whole = await client.messages.create(**asked(**fields))
        async with client.messages.stream(**asked(**fields)) as stream:
            final = await stream.get_final_message()
        for message in (whole, final):
            [block] = message.content
            assert block.type == "tool_use"
            assert message.stop_reason == "max_tokens"
            result = {"type": "tool_result", "tool_use_id": block.id, "is_error": True, "content": "it is cut"}
            await client.messages.create(
                **asked(messages=[*HELLO, message.to_param(), {"role": "user", "content": [result]}], tools=TOOLS)
            )
            assert "it is cut" in prompt_of(server)


async def _raises(call: Any, kind: type[anthropic.APIStatusError], error: str, status: int) -> str:
    with pytest.raises(kind) as caught:
        await call
    assert caught.value.status_code == status
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == error
    assert caught.value.request_id
    return str(body["error"]["message"])


async def test_errors_are_the_clients_own():
    async with over_socket(api_key="secret", max_body_bytes=2000) as server:
        async with client_of(server, api_key="wrong") as client:
            await _raises(client.messages.create(**asked()), anthropic.AuthenticationError, "authentication_error", 401)
        async with client_of(server, api_key=None, auth_token="secret") as client:
            assert (await client.messages.create(**asked(max_tokens=2))).stop_reason == "max_tokens"
        async with client_of(server, api_key="secret") as client:
            create = client.messages.create
            assert (await create(**asked(max_tokens=2))).stop_reason == "max_tokens"
            bad = await _raises(
                create(**asked(extra_body={"temperature": -1})), anthropic.BadRequestError, "invalid_request_error", 400
            )
            assert "temperature" in bad
            count = client.messages.count_tokens(model="other", messages=HELLO)
            for call in (create(**asked(model="other")), create(**asked(model="other"), stream=True), count):
                assert "other" in await _raises(call, anthropic.NotFoundError, "not_found_error", 404)
            long = create(**asked(messages=[{"role": "user", "content": "x" * 3000}]))
            await _raises(long, anthropic.RequestTooLargeError, "request_too_large", 413)
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.batches.list()


async def test_an_overloaded_server():
    refuse = {"refuse": lambda _: QUEUE_FULL}
    async with over_socket(engine=refuse) as server, client_of(server) as client:
        for stream in (False, True):
            call = client.messages.create(**asked(), stream=stream)
            error = await _raises(call, anthropic.ServiceUnavailableError, "overloaded_error", 503)
            assert "8 requests" in error


async def test_a_failure_of_the_engine():
    async with over_socket(engine={"refuse": lambda _: "device on fire"}) as server, client_of(server) as client:
        error = await _raises(client.messages.create(**asked()), anthropic.InternalServerError, "api_error", 500)
        assert "device on fire" in error


@pytest.mark.parametrize(("end", "kind"), [("fail", "api_error"), ("die", "overloaded_error"), ("abort", "api_error")])
async def test_an_error_in_the_middle_of_a_stream(live_server: ServerUnderTest, end: str, kind: str):
    engine = live_server.engine
    engine.hold()
    async with client_of(live_server) as client:
        opening = asyncio.ensure_future(client.messages.create(**asked(), stream=True))
        await engine.wait_for(lambda: len(engine.submitted) == 1)
        await engine.step()
        stream = await opening
        events: list[Any] = [await anext(stream) for _ in range(3)]
        names = [event.type for event in events]
        if end == "fail":
            engine.fail(engine.submitted[0].request_id, "page fault")
        elif end == "die":
            engine.die("page fault")
        else:
            answer = await live_server.http.post("/abort_request", json={"rid": events[0].message.id})
            assert answer.json()["aborted"] == 1
        with pytest.raises(anthropic.APIStatusError) as caught:
            await anext(stream)
    assert names == ["message_start", "content_block_start", "content_block_delta"]
    body: Any = caught.value.body
    assert body["error"]["type"] == kind
    assert ("aborted" if end == "abort" else "page fault") in body["error"]["message"]


async def test_a_whole_answer_that_is_aborted(live_server: ServerUnderTest):
    live_server.engine.hold()
    async with client_of(live_server) as client:
        extra = {"x-request-id": "mine"}
        task = asyncio.ensure_future(client.messages.create(**asked(), extra_headers=extra))
        await live_server.engine.wait_for(lambda: len(live_server.engine.submitted) == 1)
        answer = await live_server.http.post("/abort_request", json={"rid": "msg_mine"})
        assert answer.json() == {"rid": "msg_mine", "aborted": 1}
        await _raises(task, anthropic.APIStatusError, "api_error", 499)


async def test_a_client_that_leaves_ends_its_request(live_server: ServerUnderTest):
    live_server.engine.hold()
    async with client_of(live_server) as client:
        task = asyncio.ensure_future(client.messages.create(**asked()))
        await live_server.engine.wait_for(lambda: len(live_server.engine.submitted) == 1)
        task.cancel()
        await live_server.engine.wait_for(lambda: len(live_server.engine.aborted) == 1)
