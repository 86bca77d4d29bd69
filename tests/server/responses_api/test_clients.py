"""OpenAI's own client on Responses against a fake engine: answers, streams, tool loops, stored responses, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response

from tests.server.anthropic.test_clients import prompt_of, writes_in_turn
from tests.server.conftest import ServerUnderTest, over_socket
from tests.server.fake_engine import QUEUE_FULL
from tests.server.openai.test_tools import CALL, SCHEMA, writes
from tests.server.responses_api.test_recorded_events import CUSTOM, HM, TOOLS

# Shows all that a conversation has, one message a line.
SHOWS = (
    "{% if tools %}tools: {{ tools | map(attribute='function.name') | join(' ') }}{{ '\\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think> {% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %} {{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
CITY = '{"city": "Köln"}'


class City(pydantic.BaseModel):
    """A form of an answer."""

    city: str


def asked(**fields: Any) -> Any:
    return {"model": "tiny", "input": "hello"} | fields


async def in_thread[T](server: ServerUnderTest, use: Callable[[openai.OpenAI], T]) -> T:
    """Return what the blocking client gets."""

    def run() -> T:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return use(client)

    return await asyncio.to_thread(run)


async def test_the_blocking_client():
    def use(client: openai.OpenAI) -> list[Any]:
        whole = client.responses.create(**asked())
        with client.responses.create(**asked(stream=True)) as raw:
            kinds = [event.type for event in raw]
        with client.responses.stream(**asked()) as stream:
            texts = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
        counted = client.responses.input_tokens.count(**asked())
        return [whole, kinds, texts, final, counted.input_tokens]

    async with over_socket(engine=writes("Hello, you.")) as server:
        whole, kinds, texts, final, counted = await in_thread(server, use)
    assert whole.output_text == texts == final.output_text == "Hello, you."
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.usage == whole.usage
    assert whole.usage.output_tokens == 12
    assert counted == whole.usage.input_tokens
    assert whole.usage.total_tokens == counted + 12


@pytest.mark.parametrize("summary", [None, "auto"])
async def test_the_asynchronous_client(summary: str | None):
    text = f"{HM}I look.\n{CALL}\n{CUSTOM}"
    reasoning = {"effort": "low", "summary": summary}
    async with over_socket(template=SHOWS, engine=writes(text)) as server, server.openai() as client:
        whole = await client.responses.create(**asked(tools=TOOLS, reasoning=reasoning))
        kinds = set()
        async with client.responses.stream(**asked(tools=TOOLS, reasoning=reasoning)) as stream:
            async for event in stream:
                kinds.add(event.type)
            final = await stream.get_final_response()
    for answer in (whole, final):
        Response.model_validate(answer.model_dump(warnings=False))
        thought, said, call, custom = answer.output
        [shown] = thought.content if summary is None else thought.summary
        assert shown.text == "Hm."
        assert said.content[0].text == answer.output_text == "I look."
        assert (call.name, call.arguments) == ("weather", CITY)
        assert (custom.name, custom.input) == ("shell", "ls\n")
        assert call.call_id != custom.call_id
        assert len({item.id for item in answer.output}) == 4
        assert answer.usage.output_tokens_details.reasoning_tokens == len("<think>Hm.</think>")
        assert answer.usage.output_tokens == len(text.encode()) + 1
    thinks = "reasoning_summary_text" if summary else "reasoning_text"
    names = {f"response.{name}.delta" for name in (thinks, "output_text", "function_call_arguments")}
    assert names | {"response.custom_tool_call_input.delta"} <= kinds


@pytest.mark.parametrize("way", ["output", "encrypted", "dumped", "previous", "references"])
async def test_a_tool_loop_of_several_turns(way: str):
    """All ways to continue a conversation show the model the same, and each prompt begins with the one before."""
    texts = [f"{HM}I look.\n{CALL}\n{CUSTOM}", f"<think>So?</think>\n\n{CALL}", "It rains."]
    fields: dict[str, Any] = {"tools": TOOLS, "instructions": "Be short."}
    if way == "encrypted":
        fields |= {"include": ["reasoning.encrypted_content"], "store": False, "reasoning": {"summary": "auto"}}
    items: list[Any] = [{"role": "user", "content": "hello"}]
    async with over_socket(template=SHOWS, engine=writes_in_turn(*texts)) as server, server.openai() as client:
        for turn in range(3):
            if turn == 1:
                answer: Any = await client.responses.create(**asked(input=items, **fields))
            else:
                async with client.responses.stream(**asked(input=items, **fields)) as stream:
                    answer = await stream.get_final_response()
            results = [
                {"type": f"{item.type.removesuffix('_call')}_call_output", "call_id": item.call_id, "output": "rain"}
                for item in answer.output
                if item.type in ("function_call", "custom_tool_call")
            ]
            if way == "previous":
                items, fields["previous_response_id"] = results, answer.id
            elif way == "references":
                items += [*({"type": "item_reference", "id": item.id} for item in answer.output), *results]
            elif way == "dumped":
                items += [*(item.model_dump(exclude={"id", "status"}) for item in answer.output), *results]
            elif way == "encrypted":
                shown = [item.model_copy(update={"summary": []}, deep=True) for item in answer.output]
                items += [*shown, *results]
            else:
                items += [*answer.output, *results]
        prompts = [prompt_of(server, number) for number in range(3)]
    assert answer.output_text == "It rains."
    assert prompts[2] == (
        "tools: weather shell\nsystem: Be short.\nuser: hello\n"
        f'assistant: <think>Hm.</think> I look. weather{CITY} shell{{"input": "ls\\n"}}\ntool: rain\ntool: rain\n'
        f"assistant: <think>So?</think>  weather{CITY}\ntool: rain\nassistant:"
    )
    assert prompts[2].startswith(prompts[1].removesuffix("assistant:"))
    assert prompts[1].startswith(prompts[0].removesuffix("assistant:"))


async def test_forms_of_answers():
    schema = SCHEMA | {"additionalProperties": False}
    strict: Any = {"type": "function", "name": "weather", "parameters": schema, "strict": True}
    async with over_socket(engine=writes(CITY)) as server, server.openai() as client:
        parsed = await client.responses.parse(**asked(text_format=City))
        async with client.responses.stream(**asked(text_format=City)) as stream:
            final: Any = await stream.get_final_response()
        assert parsed.output_parsed == final.output_parsed == City(city="Köln")
        assert all("city" in request.grammar for request in server.engine.submitted)
    async with over_socket(engine=writes(CALL)) as server, server.openai() as client:
        called: Any = await client.responses.parse(**asked(tools=[strict], tool_choice="required"))
    assert called.output[0].parsed_arguments == {"city": "Köln"}


async def test_stored_responses():
    async with over_socket(engine=writes("Hello.")) as server, server.openai() as client:
        first = await client.responses.create(**asked(metadata={"a": "b"}))
        second = await client.responses.create(**asked(input="more", previous_response_id=first.id))
        assert await client.responses.retrieve(first.id) == first
        assert first.metadata == {"a": "b"}
        items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=1)]
        assert [(item.type, item.role, item.content[0].text) for item in items] == [  # type: ignore[union-attr]
            ("message", "user", "hello"),
            ("message", "assistant", "Hello."),
            ("message", "user", "more"),
        ]
        after = await client.responses.input_items.list(second.id, order="desc", after=items[1].id or "")
        assert [item.id for item in after.data] == [items[0].id]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.create(**asked(previous_response_id=first.id))
        assert caught.value.code == "previous_response_not_found"
        third = await client.responses.create(**asked(previous_response_id=second.id, store=False))
        assert prompt_of(server).count("Hello.") == 2
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(third.id)
        with pytest.raises(openai.BadRequestError, match="nothing to cancel"):
            await client.responses.cancel(second.id)


async def test_an_open_stream_is_cancelled(live_server: ServerUnderTest):
    engine = live_server.engine
    engine.hold()
    async with live_server.openai() as client:
        opening = asyncio.ensure_future(client.responses.create(**asked(stream=True)))
        await engine.wait_for(lambda: len(engine.submitted) == 1)
        await engine.step()
        stream = await opening
        created: Any = await anext(stream)
        seen = await client.responses.retrieve(created.response.id)
        cancelled = await client.responses.cancel(created.response.id)
        rest = [event async for event in stream]
        last: Any = rest[-1]
        kept = await client.responses.retrieve(created.response.id)
    assert seen.status == "in_progress"
    assert cancelled.status == last.response.status == kept.status == "cancelled"
    assert cancelled.output_text == last.response.output_text
    assert len(engine.aborted) == 1


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({"max_output_tokens": 3}, "incomplete", "max_output_tokens"),
        ({"max_output_tokens": 20_000}, "incomplete", "max_output_tokens"),
        ({"extra_body": {"stop": ["zz", " tw"]}}, "completed", None),
    ],
)
async def test_reasons_of_the_end(fields: dict[str, Any], status: str, reason: str | None):
    engine = writes("one two" * 20) | {"max_model_len": 64}
    async with over_socket(engine=engine) as server, server.openai() as client:
        whole = await client.responses.create(**asked(**fields))
        events: list[Any] = [event async for event in await client.responses.create(**asked(stream=True, **fields))]
    last = events[-1]
    assert last.type == f"response.{status}"
    for answer in (whole, last.response):
        assert answer.status == answer.output[0].status == status
        assert (answer.incomplete_details and answer.incomplete_details.reason) == reason
        assert "one two".startswith(answer.output_text[:3])


async def _raises(call: Any, kind: type[openai.APIStatusError], status: int, **fields: Any) -> str:
    with pytest.raises(kind) as caught:
        await call
    error = caught.value
    assert (error.status_code, {name: getattr(error, name) for name in fields}) == (status, fields)
    assert error.request_id
    return str(error.message)


async def test_errors_are_the_clients_own():
    async with over_socket(api_key="secret", max_body_bytes=2000, engine={"max_model_len": 1000}) as server:
        async with server.openai(api_key="wrong") as client:
            await _raises(client.responses.create(**asked()), openai.AuthenticationError, 401)
        async with server.openai(api_key="secret") as client:
            create = client.responses.create
            refused: dict[str, Any] = {
                "temperature": {"temperature": -1},
                "background": {"background": True},
                "input[0].role": {"input": [{"role": "judge", "content": "x"}]},
                "input[0]": {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}]},
                "tools[0].type": {"tools": [{"type": "web_search"}]},
                "text.format.schema": {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 1}}}},
            }
            for param, fields in refused.items():
                for stream in (False, True):
                    await _raises(create(**asked(**fields), stream=stream), openai.BadRequestError, 400, param=param)
            long = create(**asked(input="x" * 1200))
            await _raises(long, openai.BadRequestError, 400, code="context_length_exceeded")
            search = create(**asked(tools=[{"type": "web_search"}]))
            assert 'web_search = "disabled"' in await _raises(search, openai.BadRequestError, 400)
            assert "other" in await _raises(create(**asked(model="other")), openai.NotFoundError, 404)
            await _raises(create(**asked(input="x" * 3000)), openai.APIStatusError, 413)


async def test_an_overloaded_server():
    async with over_socket(engine={"refuse": lambda _: QUEUE_FULL}) as server, server.openai() as client:
        for stream in (False, True):
            error = await _raises(client.responses.create(**asked(), stream=stream), openai.InternalServerError, 503)
            assert "8 requests" in error


async def test_a_failure_of_the_engine():
    async with over_socket(engine={"refuse": lambda _: "device on fire"}) as server, server.openai() as client:
        assert "device on fire" in await _raises(client.responses.create(**asked()), openai.InternalServerError, 500)


@pytest.mark.parametrize("end", ["fail", "die"])
async def test_an_error_in_the_middle_of_a_stream(live_server: ServerUnderTest, end: str):
    engine = live_server.engine
    engine.hold()
    async with live_server.openai() as client:
        opening = asyncio.ensure_future(client.responses.create(**asked(stream=True)))
        await engine.wait_for(lambda: len(engine.submitted) == 1)
        await engine.step()
        stream = await opening
        await anext(stream)
        if end == "fail":
            engine.fail(engine.submitted[0].request_id, "page fault")
        else:
            engine.die("page fault")
        events: list[Any] = [event async for event in stream]
    failed = events[-1]
    assert failed.type == "response.failed"
    assert failed.response.status == "failed"
    assert failed.response.error.code == "server_error"
    assert "page fault" in failed.response.error.message
    assert len(failed.response.output_text) == 1


async def test_a_client_that_leaves_ends_its_request(live_server: ServerUnderTest):
    live_server.engine.hold()
    async with live_server.openai() as client:
        task = asyncio.ensure_future(client.responses.create(**asked()))
        await live_server.engine.wait_for(lambda: len(live_server.engine.submitted) == 1)
        task.cancel()
        await live_server.engine.wait_for(lambda: len(live_server.engine.aborted) == 1)
