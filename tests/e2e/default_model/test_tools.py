"""Tools with the clients that people use: the default model, a real process, `openai` and `langchain-openai`."""

from __future__ import annotations

import asyncio
import functools
from typing import Any, Literal

import openai
import pydantic
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from llguidance import LLMatcher, LLTokenizer

from tests.e2e.server_process import ServerProcess
from tests.text.grammars.custom import custom_grammars

pytestmark = pytest.mark.process

MODEL = "smollm2-135m-instruct"


class Weather(pydantic.BaseModel):
    """Find out the weather."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: int = pydantic.Field(ge=1, le=14)


@tool
def weather(city: Literal["Paris", "Rome", "Oslo"], days: int = 1) -> str:
    """Find out the weather of a city."""
    return f"{days} days of rain in {city}"


@tool
def add(one: int, other: int) -> int:
    """Add two numbers."""
    return one + other


ASKING: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "How is the weather in Rome?"}],
    "tools": [openai.pydantic_function_tool(Weather)],
    "max_tokens": 100,
    "temperature": 2,
}


@pytest.fixture
def chat_model(server: ServerProcess) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key=pydantic.SecretStr("none"),
        model=MODEL,
        temperature=0,
        max_completion_tokens=150,
        max_retries=0,
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_a_call_streamed_or_not(client: openai.OpenAI, seed: int) -> None:
    asking = ASKING | {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
    whole = client.chat.completions.parse(**asking).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    [call] = whole.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    with client.chat.completions.stream(**asking) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    [streamed] = final.message.tool_calls or []
    assert streamed.function.parsed_arguments == call.function.parsed_arguments
    assert kinds.count("tool_calls.function.arguments.delta") > 1
    assert kinds[-1] == "tool_calls.function.arguments.done"


def test_many_at_once_some_free_some_held(server: ServerProcess) -> None:
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "Weather"}}, "auto", "none"]

    async def ask(client: openai.AsyncOpenAI, number: int) -> None:
        choice = choices[number % 4]
        answer = await client.chat.completions.create(**ASKING, seed=number, tool_choice=choice)
        [found] = answer.choices
        calls = found.message.tool_calls or []
        for call in calls if found.finish_reason != "length" else []:
            assert call.type == "function"
            Weather.model_validate_json(call.function.arguments)
        if choice == "none":
            assert not calls
        elif choice != "auto":
            assert calls
            assert found.finish_reason in ("length", "tool_calls" if choice == "required" else "stop")

    async def ask_all() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300) as client:
            await asyncio.gather(*(ask(client, number) for number in range(16)))

    asyncio.run(ask_all())


def test_a_conversation_with_a_result(chat_model: ChatOpenAI) -> None:
    question = HumanMessage("What is 3 + 4?")
    asking = chat_model.bind_tools([weather, add], tool_choice="add")
    answer = asking.invoke([question])
    assert isinstance(answer, AIMessage)
    assert [call["name"] for call in answer.tool_calls] == ["add"]
    assert not answer.invalid_tool_calls
    results = [ToolMessage(str(add.invoke(call["args"])), tool_call_id=str(call["id"])) for call in answer.tool_calls]
    last = chat_model.bind_tools([weather, add], tool_choice="none").invoke([question, answer, *results])
    assert last.content
    assert last.usage_metadata is not None


def test_calls_in_a_stream_of_langchain(chat_model: ChatOpenAI) -> None:
    asking = chat_model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False, strict=True)
    whole = asking.invoke("How is the weather in Rome?")
    assert isinstance(whole, AIMessage)
    parts = list(asking.stream("How is the weather in Rome?"))
    total = parts[0]
    for part in parts[1:]:
        total += part  # type: ignore[assignment]
    assert isinstance(total, AIMessageChunk)
    assert [call["args"] for call in total.tool_calls] == [call["args"] for call in whole.tool_calls]
    assert total.response_metadata["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_of_langchain(chat_model: ChatOpenAI, method: Literal["json_schema", "function_calling"]):
    found = chat_model.with_structured_output(Weather, method=method).invoke("Ask for the weather in Rome, as JSON.")
    assert isinstance(found, Weather)


@functools.cache
def _bytes_vocabulary() -> LLTokenizer:
    return LLTokenizer("byte")


def accepts(form: dict[str, str], text: str, *, is_cut: bool) -> bool:
    """Return whether a grammar as a client writes it has a text, or one that begins so."""
    make = LLMatcher.grammar_from_lark if form["syntax"] == "lark" else LLMatcher.grammar_from_regex
    vocabulary = _bytes_vocabulary()
    matcher = LLMatcher(vocabulary, make(form["definition"]))
    tokens = vocabulary.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and (is_cut or matcher.is_accepting())


FORMS = [{"syntax": "lark", "definition": custom_grammars.GRAMMARS[name]} for name in ("arithmetic", "patch", "sql")]
FORMS.append({"syntax": "lark", "definition": 'start: LINE~1..3 "END" "\\""\nLINE: /[^\\n]{0,12}/ "\\n"'})
FORMS.append({"syntax": "regex", "definition": r"[a-z]{2,9}(, \"[^\"\n]{0,9}\"\n){1,3}"})


def test_inputs_of_custom_tools_are_in_their_grammars(server: ServerProcess) -> None:
    """At temperature 2, on both routes, whole and streamed; what is cut off is a beginning."""
    question = "Call the tool."

    async def chat(client: openai.AsyncOpenAI, form: dict[str, str], asking: dict[str, Any]) -> list[tuple[str, bool]]:
        tool = {"type": "custom", "custom": {"name": "f", "format": {"type": "grammar", "grammar": form}}}
        messages: list[Any] = [{"role": "user", "content": question}]
        answer = await client.chat.completions.create(
            **asking, messages=messages, tools=[tool], tool_choice="required", max_tokens=90
        )
        [found] = answer.choices
        calls = found.message.tool_calls
        return [(call.custom.input, found.finish_reason == "length" and call is calls[-1]) for call in calls]

    async def respond(
        client: openai.AsyncOpenAI, form: dict[str, str], asking: dict[str, Any]
    ) -> list[tuple[str, bool]]:
        tool = {"type": "custom", "name": "f", "format": {"type": "grammar", **form}}
        choice = {"type": "custom", "name": "f"}
        asking |= {"input": question, "tools": [tool], "tool_choice": choice, "max_output_tokens": 90}
        written, inputs = "", []
        async with client.responses.stream(**asking) as stream:
            async for event in stream:
                if event.type == "response.custom_tool_call_input.delta":
                    written += event.delta
                elif event.type == "response.custom_tool_call_input.done":
                    assert event.input == written
                elif event.type == "response.output_item.done":
                    inputs.append((written, event.item.status == "incomplete"))
        return inputs

    async def ask_all() -> list[tuple[dict[str, str], str, bool]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300) as client:
            asked = [
                (form, ask(client, form, {"model": MODEL, "temperature": 2, "extra_body": {"seed": number}}))
                for number in range(2)
                for form in FORMS
                for ask in (chat, respond)
            ]
            found = await asyncio.gather(*(answer for _, answer in asked))
        return [(form, *one) for (form, _), inputs in zip(asked, found) for one in inputs]

    inputs = asyncio.run(ask_all())
    wrong = [(form, text) for form, text, is_cut in inputs if not accepts(form, text, is_cut=is_cut)]
    assert not wrong
    assert len(inputs) >= 20
    assert sum(not is_cut for _, _, is_cut in inputs) >= 6
