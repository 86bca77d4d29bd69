"""Clients of Anthropic's Messages API with the default model in a real process: tool loops, streams, output types."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from typing import Any, Literal

import pydantic
import pytest

from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.process

MODEL = "smollm2-135m-instruct"
QUESTION = "How is the weather in Rome?"


class Report(pydantic.BaseModel):
    """A report on the weather."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]
    rain: bool


REPORT: Any = {"name": "report", "description": "Hands in a report.", "input_schema": Report.model_json_schema()}
ONE_CALL = {"type": "any", "disable_parallel_tool_use": True}
CHOICES: list[Any] = [ONE_CALL, {"type": "tool", "name": "report"}, ONE_CALL]


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """What a client leaves open is found here, not in a later test."""
    yield
    gc.collect()


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Find out the weather of a city."""
    return f"rain in {city}"


def asked(messages: list[Any], turn: int) -> Any:
    return {
        "model": MODEL,
        "max_tokens": 100,
        "messages": messages,
        "tools": [REPORT],
        "tool_choice": CHOICES[turn],
        "extra_body": {"temperature": 0},
    }


def go_on(messages: list[Any], answer: Any) -> None:
    """Add an answer and the results of its calls, after checking it."""
    assert answer.stop_reason == "tool_use"
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens > 0
    results = []
    for block in answer.content:
        Report.model_validate(block.input)
        results.append({"type": "tool_result", "tool_use_id": block.id, "content": "Thanks."})
    assert results
    messages += [answer.to_param(), {"role": "user", "content": results}]


def test_the_blocking_client_in_a_tool_loop(server: ServerProcess) -> None:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        cached = []
        for turn in range(3):
            counted = client.messages.count_tokens(model=MODEL, messages=messages, tools=[REPORT])
            answer = client.messages.create(**asked(messages, turn))
            usage = answer.usage
            cached.append(usage.cache_read_input_tokens or 0)
            assert counted.input_tokens == usage.input_tokens + cached[-1]
            go_on(messages, answer)
        assert cached[2] > cached[1] > 0, "each turn finds more cached tokens"


def test_the_asynchronous_client_streams_what_the_whole_has(server: ServerProcess) -> None:
    import anthropic

    async def run() -> None:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": QUESTION}]
            async with client.messages.stream(**asked(messages, 0)) as stream:
                final = await stream.get_final_message()
            whole = await client.messages.create(**asked(messages, 0))
            assert [block.input for block in final.content] == [block.input for block in whole.content]
            go_on(messages, final)

    asyncio.run(run())


def test_langchain(server: ServerProcess) -> None:
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_core.tools import tool

    model = ChatAnthropic(
        base_url=server.url,
        api_key=pydantic.SecretStr("none"),
        model_name=MODEL,
        max_tokens_to_sample=100,
        temperature=0,
        max_retries=0,
        timeout=60,
        stop=None,
    )
    bound = model.bind_tools([tool(weather)], tool_choice="any", parallel_tool_calls=False)
    conversation: list[Any] = [HumanMessage(QUESTION)]
    answer = bound.invoke(conversation)
    assert isinstance(answer, AIMessage)
    [call] = answer.tool_calls
    conversation += [answer, ToolMessage(weather(call["args"]["city"]), tool_call_id=str(call["id"]))]
    pieces = [*bound.stream(conversation)]
    whole = pieces[0]
    for one in pieces[1:]:
        whole = whole + one
    assert isinstance(whole, AIMessage)
    assert len(whole.tool_calls) == 1
    assert whole.usage_metadata
    assert "".join(str(one.text) for one in model.stream("Hello!", max_tokens=8))
    for method in ("function_calling", "json_schema"):
        found = model.with_structured_output(Report, method=method).invoke("Report on Oslo.")
        assert isinstance(found, Report)


def test_pydantic_ai_gets_its_output_type(server: ServerProcess) -> None:
    import anthropic
    import pydantic_ai
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    settings: Any = {"max_tokens": 100, "temperature": 0, "parallel_tool_calls": False}

    async def run() -> list[object]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            provider = AnthropicProvider(anthropic_client=client)
            model = AnthropicModel(MODEL, provider=provider, profile={"supports_json_schema_output": True})
            agent = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Report), model_settings=settings)
            whole = (await agent.run("Report on Rome.")).output
            async with agent.run_stream("Report on Oslo.") as stream:
                return [whole, await stream.get_output()]

    assert all(isinstance(one, Report) for one in asyncio.run(run()))


def test_litellm(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    tools = [{"type": "function", "function": {"name": "report", "parameters": Report.model_json_schema()}}]
    fields: Any = {
        "model": f"anthropic/{MODEL}",
        "api_base": server.url,
        "api_key": "none",
        "max_tokens": 100,
        "temperature": 0,
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    whole: Any = litellm.completion(messages=messages, **fields)
    answer = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls"
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Thanks."} for call in answer.tool_calls]
    pieces = [*litellm.completion(messages=[*messages, answer, *results], stream=True, **fields)]
    streamed: Any = litellm.stream_chunk_builder(pieces)
    for message in (answer, streamed.choices[0].message):
        Report.model_validate(json.loads(message.tool_calls[0].function.arguments))
