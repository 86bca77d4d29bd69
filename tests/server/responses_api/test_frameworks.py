"""Frameworks of agents on Responses against a fake engine: what they get, and what the model is shown in turn two."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Any

import agents
import pydantic_ai
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, custom_tool
from openai.types import Reasoning
from pydantic import SecretStr
from pydantic_ai.models.openai import OpenAIResponsesModel, OpenAIResponsesModelSettings
from pydantic_ai.providers.openai import OpenAIProvider

from tests.server.anthropic.test_clients import prompt_of, writes_in_turn
from tests.server.conftest import ServerUnderTest, over_socket
from tests.server.openai.test_tools import CALL, SCHEMA, writes
from tests.server.responses_api.test_clients import CITY, SHOWS, City
from tests.server.responses_api.test_recorded_events import CUSTOM, HM

TURNS = f"{HM}I look.\n{CALL}", "It rains."
FIRST = "tools: weather\nsystem: Be short.\nuser: hello\nassistant:"
SECOND = f"{FIRST} <think>Hm.</think> I look. weather{CITY}\ntool: rain in Köln\nassistant:"
NUM_TOKENS = sum(len(text.encode()) + 1 for text in TURNS)
ENCRYPTED = "reasoning.encrypted_content"
# How a conversation goes on: with what came, with reasoning in the form for sending it back, or by id.
WAYS = pytest.mark.parametrize(
    ("way", "streams"), [("whole", False), ("whole", True), ("packed", True), ("stored", False)]
)


def weather(city: str) -> str:
    """Say the weather of a city."""
    return f"rain in {city}"


def model_of(client: Any) -> agents.OpenAIResponsesModel:
    agents.set_tracing_disabled(True)
    return agents.OpenAIResponsesModel("tiny", client)


async def run_agent(agent: agents.Agent, question: str, streams: bool, **options: Any) -> Any:
    """Return the result of a run."""
    if not streams:
        return await agents.Runner.run(agent, question, **options)
    run = agents.Runner.run_streamed(agent, question, **options)
    async for _ in run.stream_events():
        pass
    return run


@WAYS
async def test_openai_agents(streams: bool, way: str):
    settings = agents.ModelSettings()
    if way == "packed":
        reasoning = Reasoning(effort="low", summary="auto")
        settings = agents.ModelSettings(store=False, response_include=[ENCRYPTED], reasoning=reasoning)
    async with over_socket(template=SHOWS, engine=writes_in_turn(*TURNS, "Bye.")) as server, server.openai() as client:
        agent = agents.Agent(
            name="weather",
            instructions="Be short.",
            tools=[agents.function_tool(weather)],
            model=model_of(client),
            model_settings=settings,
        )
        run = await run_agent(agent, "hello", streams, auto_previous_response_id=way == "stored")
        if way == "stored":
            again = await run_agent(agent, "bye", streams, previous_response_id=run.last_response_id)
        else:
            again = await run_agent(agent, [*run.to_input_list(), {"role": "user", "content": "bye"}], streams)
    assert (run.final_output, again.final_output) == ("It rains.", "Bye.")
    assert run.context_wrapper.usage.output_tokens == NUM_TOKENS
    assert prompt_of(server, 0) == FIRST
    assert prompt_of(server, 1) == SECOND
    assert prompt_of(server, 2) == f"{SECOND} It rains.\nuser: bye\nassistant:"


@pytest.mark.parametrize("streams", [False, True])
async def test_openai_agents_hand_over_and_write_any_text(streams: bool):
    hand_over = '<tool_call>\n{"name": "transfer_to_other", "arguments": {}}\n</tool_call>'
    seen = []

    async def shell(context: Any, command: str) -> str:
        seen.append(command)
        return "made"

    engine = writes_in_turn(hand_over, CUSTOM, CITY)
    async with over_socket(template=SHOWS, engine=engine) as server, server.openai() as client:
        model = model_of(client)
        tools: list[Any] = [agents.CustomTool(name="shell", description="Runs it.", on_invoke_tool=shell)]
        other = agents.Agent(name="other", model=model, tools=tools, output_type=City)
        first = agents.Agent(name="first", model=model, handoffs=[other])
        run = await run_agent(first, "hello", streams)
    assert run.last_agent is other
    assert run.final_output == City(city="Köln")
    assert seen == ["ls\n"]
    assert prompt_of(server).splitlines()[-3:] == ['assistant:  shell{"input": "ls\\n"}', "tool: made", "assistant:"]


async def read_all(context: Any, events: AsyncIterable[Any]) -> None:
    async for _ in events:
        pass


@WAYS
async def test_pydantic_ai(streams: bool, way: str):
    """It asks for packed reasoning if the model's name is one of OpenAI's."""
    name = "gpt-5.5" if way == "packed" else "tiny"
    settings = OpenAIResponsesModelSettings(openai_previous_response_id="auto" if way == "stored" else None)
    running = over_socket(template=SHOWS, engine=writes_in_turn(*TURNS), served_model_name=name)
    async with running as server, server.openai() as client:
        model = OpenAIResponsesModel(name, provider=OpenAIProvider(openai_client=client))
        agent = pydantic_ai.Agent(model, instructions="Be short.", tools=[weather], model_settings=settings)
        run = await agent.run("hello", event_stream_handler=read_all if streams else None)
    assert run.output == "It rains."
    assert run.usage.output_tokens == NUM_TOKENS
    assert prompt_of(server) == SECOND


@pytest.mark.parametrize("output", ["native", "tool"])
async def test_pydantic_ai_gets_its_output_type(output: str):
    text = CITY if output == "native" else CALL.replace("weather", "final_result")
    wanted: Any = pydantic_ai.NativeOutput(City) if output == "native" else City
    async with over_socket(template=SHOWS, engine=writes(text)) as server, server.openai() as client:
        model = OpenAIResponsesModel("tiny", provider=OpenAIProvider(openai_client=client))
        run = await pydantic_ai.Agent(model, output_type=wanted).run("hello")
    assert run.output == City(city="Köln")
    assert "city" in server.engine.submitted[0].grammar


def langchain(server: ServerUnderTest, **fields: Any) -> ChatOpenAI:
    settings: dict[str, Any] = {"model": "tiny", "use_responses_api": True, "max_retries": 0, **fields}
    return ChatOpenAI(base_url=f"{server.url}/v1", api_key=SecretStr("none"), **settings)


async def langchain_turn(model: Any, messages: list[Any], streams: bool) -> Any:
    """Return the answer to messages."""
    if not streams:
        return await model.ainvoke(messages)
    pieces = [piece async for piece in model.astream(messages)]
    answer = AIMessageChunk(content="")
    for piece in pieces:
        answer += piece
    return answer


@WAYS
async def test_langchain(streams: bool, way: str):
    """Of a stream, it keeps no reasoning that it could read."""
    fields: dict[str, Any] = {
        "whole": {},
        "packed": {"store": False, "include": [ENCRYPTED], "reasoning": {"summary": "auto"}, "verbosity": "low"},
        "stored": {"use_previous_response_id": True},
    }[way]
    async with over_socket(template=SHOWS, engine=writes_in_turn(*TURNS)) as server:
        model = langchain(server, **fields).bind_tools([tool(weather)])
        messages: list[Any] = [SystemMessage("Be short."), HumanMessage("hello")]
        answer = await langchain_turn(model, messages, streams)
        [call] = answer.tool_calls
        result = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
        last = await langchain_turn(model, [*messages, answer, result], streams)
    assert (answer.text, last.text) == ("I look.", "It rains.")
    assert answer.usage_metadata["output_tokens"] + last.usage_metadata["output_tokens"] == NUM_TOKENS
    loses_reasoning = streams and way == "whole"
    assert prompt_of(server) == (SECOND.replace("<think>Hm.</think> ", "") if loses_reasoning else SECOND)


async def test_langchain_gets_forms_and_writes_any_text():
    @custom_tool
    def shell(command: str) -> str:
        """Run it."""
        return "made"

    async with over_socket(template=SHOWS, engine=writes_in_turn(CITY, CUSTOM, CUSTOM, "ok")) as server:
        form = langchain(server).with_structured_output(City)
        assert await form.ainvoke("hello") == City(city="Köln")
        model = langchain(server).bind_tools([shell])
        for streams in (False, True):
            answer = await langchain_turn(model, [HumanMessage("hello")], streams)
            [call] = answer.tool_calls
            assert call["args"] == {"__arg1": "ls\n"}
        last = await model.ainvoke([HumanMessage("hello"), answer, shell.invoke(call)])
    assert last.text == "ok"
    assert prompt_of(server).splitlines()[-3:] == ['assistant:  shell{"input": "ls\\n"}', "tool: made", "assistant:"]


IMPORTS_NOISILY = pytest.mark.filterwarnings("ignore::UserWarning:pydantic", "ignore::UserWarning:litellm")


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, without what it asks of the internet."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    return litellm


@IMPORTS_NOISILY
@pytest.mark.parametrize("name", ["tiny", "gpt-5.5"])
async def test_litellm(litellm: Any, name: str):
    """It streams itself if the model's name is none that it knows."""
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    engine = writes_in_turn(*TURNS)
    async with over_socket(template=SHOWS, engine=engine, served_model_name=name) as server:
        fields: dict[str, Any] = {"model": f"openai/{name}", "api_base": f"{server.url}/v1", "api_key": "none"}
        fields |= {"instructions": "Be short.", "tools": tools}
        answer = await litellm.aresponses(input="hello", **fields)
        call = answer.output[-1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain in Köln"}
        items = [{"role": "user", "content": "hello"}, *(item.model_dump() for item in answer.output), result]
        stream = [event async for event in await litellm.aresponses(input=items, stream=True, **fields)]
    last = stream[-1].response
    assert last.output[0].content[0].text == "It rains."
    assert answer.usage.output_tokens + last.usage.output_tokens == NUM_TOKENS
    assert prompt_of(server) == SECOND


@IMPORTS_NOISILY
@pytest.mark.parametrize("streams", [False, True])
async def test_litellm_takes_chats_to_responses(litellm: Any, streams: bool):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hello"}]
    async with over_socket(template=SHOWS, engine=writes_in_turn(*TURNS)) as server:
        fields: dict[str, Any] = {"api_base": f"{server.url}/v1", "api_key": "none", "tools": tools}
        fields |= {"include": [ENCRYPTED], "reasoning_effort": {"effort": "low", "summary": "auto"}}

        async def take_turn() -> Any:
            answer = await litellm.acompletion(
                model="openai/responses/tiny", messages=messages, stream=streams, **fields
            )
            return litellm.stream_chunk_builder([piece async for piece in answer]) if streams else answer

        first = await take_turn()
        message = first.choices[0].message
        [call] = message.tool_calls
        messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "rain in Köln"}]
        last = await take_turn()
    assert (message.content, last.choices[0].message.content) == ("I look.", "It rains.")
    assert (call.function.name, call.function.arguments) == ("weather", CITY)
    assert prompt_of(server) == SECOND
