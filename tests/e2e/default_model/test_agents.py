"""Agent frameworks that people use, with the default model in a real process: tool loops, cut calls, sets, efforts."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any, Literal

import agents
import openai
import pydantic
import pydantic_ai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.process

MODEL = "smollm2-135m-instruct"
QUESTION = "How is the weather in Rome and Oslo?"


class Report(pydantic.BaseModel):
    """A report with what schemas of Python's types ask: sets, patterns, large numbers, bounds."""

    model_config = pydantic.ConfigDict(extra="forbid")

    cities: set[Literal["Rome", "Oslo", "Bonn"]] = pydantic.Field(min_length=1)
    code: str = pydantic.Field(pattern=r"^[A-Z]{2}-\d{1,3}$")
    stamp: int = pydantic.Field(ge=-(2**63), le=2**63 - 1)
    share: float = pydantic.Field(gt=0, lt=1)
    note: str | None = pydantic.Field(None, max_length=8)


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """What a client leaves open is found here, not in a later test."""
    yield
    gc.collect()


def weather(cities: set[Literal["Rome", "Oslo", "Bonn"]], days: Literal[1, 2, 3] = 1) -> str:
    """Find out the weather of some cities."""
    return f"{days} days of rain in {', '.join(sorted(cities))}"


@pytest.mark.parametrize(
    ("kind", "effort"), [(agents.OpenAIChatCompletionsModel, "none"), (agents.OpenAIResponsesModel, "high")]
)
def test_openai_agents_in_a_tool_loop(server: ServerProcess, kind: Any, effort: Any) -> None:
    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            agent = agents.Agent(
                name="weather agent",
                instructions="Use the tools.",
                tools=[agents.function_tool(weather)],
                model=kind(MODEL, openai_client=client),
                model_settings=agents.ModelSettings(
                    tool_choice="required",
                    max_tokens=200,
                    temperature=0.7,
                    verbosity="low",
                    reasoning=None if effort is None else openai.types.Reasoning(effort=effort),
                    parallel_tool_calls=False,
                    metadata={"run": "1"},
                    extra_body={"seed": 1},
                ),
                output_type=Report,
                tool_use_behavior="stop_on_first_tool",
            )
            agents.set_tracing_disabled(True)
            return await agents.Runner.run(agent, QUESTION, max_turns=3)

    found = asyncio.run(run())
    assert "rain in" in str(found.final_output)


def test_an_agent_goes_on_after_a_call_that_was_cut(server: ServerProcess) -> None:
    """Agents keep what the model wrote, and send it back with an error as the result."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        tools = [{"type": "function", "function": {"name": "report", "parameters": Report.model_json_schema()}}]
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for limit in (8, 16, 24):
            cut = client.chat.completions.create(
                model=MODEL,
                messages=messages,
                tools=tools,
                tool_choice="required",
                max_tokens=limit,  # type: ignore
            ).choices[0]
            assert cut.finish_reason == "length"
            assert not cut.message.content
            calls = cut.message.tool_calls or []
            messages += [cut.message, *({"role": "tool", "tool_call_id": call.id, "content": None} for call in calls)]
        last = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, max_tokens=8)  # type: ignore
        assert last.usage is not None


@pytest.mark.parametrize("output", ["tool", "native"])
def test_pydantic_ai_gets_its_output_type(server: ServerProcess, output: str) -> None:
    wanted = (
        pydantic_ai.NativeOutput(Report, strict=False)
        if output == "native"
        else pydantic_ai.ToolOutput(Report, strict=False)
    )
    settings: Any = {"max_tokens": 200, "temperature": 0.5, "openai_reasoning_effort": "low", "extra_body": {"seed": 3}}

    async def run() -> object:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            model = OpenAIResponsesModel if output == "native" else OpenAIChatModel
            agent = pydantic_ai.Agent(model(MODEL, provider=OpenAIProvider(openai_client=client)), output_type=wanted)
            return (await agent.run("Report on Rome.", model_settings=settings)).output

    assert isinstance(asyncio.run(run()), Report)


def test_langchain_in_a_tool_loop_with_an_effort(server: ServerProcess) -> None:
    model = ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key=pydantic.SecretStr("none"),
        model=MODEL,
        temperature=0.5,
        max_completion_tokens=200,
        max_retries=0,
        reasoning_effort="low",
        seed=1,
    )
    bound = model.bind_tools([tool(weather)], tool_choice="any", parallel_tool_calls=False, strict=True)
    conversation: list[Any] = [HumanMessage(QUESTION)]
    for _ in range(2):
        answer = bound.invoke(conversation)
        assert isinstance(answer, AIMessage)
        [call] = answer.tool_calls
        result = weather(set(call["args"]["cities"]), **{k: v for k, v in call["args"].items() if k == "days"})
        conversation += [answer, ToolMessage(result, tool_call_id=str(call["id"]))]
    assert isinstance(model.with_structured_output(Report, method="json_schema").invoke("Report on Oslo."), Report)
