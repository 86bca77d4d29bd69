"""The prefix cache over ten turns of an agent that reasons and calls a tool, by the tokens that each turn finds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from jaxserve.api_types import EngineRequest
from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.openai.test_tools import SCHEMA
from tests.server.tiny import END_ID, SPECIAL

PAGE = 16
# Like those of Qwen 3: reasoning is shown after the last question only.
TEMPLATE = """{%- set last = namespace(at=0) -%}
{%- for m in messages if m.role == 'user' -%}{%- set last.at = m.number -%}{%- endfor -%}
{%- for tool in tools or [] -%}{{ tool | tojson }}{%- endfor -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and m.reasoning_content and m.number > last.at -%}
<think>
{{ m.reasoning_content }}
</think>

{% endif -%}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
{{ '\\n' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
<think>
{% endif -%}""".replace("m.number", "messages.index(m)")
CALL = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "C"}}\n</tool_call>'
LOOP = 5  # an answer without a call, and a new question


def says(turn: int) -> str:
    """Return what the model writes in a turn after the beginning of its reasoning."""
    return f"Thought {turn}.\n</think>\n\nAnswer {turn}." + (CALL if turn % LOOP < LOOP - 1 else "")


class Agent:
    """An agent on one of the routes, which sends back what it got, or for `stored` the id of it. With `packed` it
    gets and sends reasoning that it can't read."""

    def __init__(self, server: ServerUnderTest, route: str) -> None:
        self.server, self.route = server, route
        self.previous: str | None = None
        self.messages: list[Any] = [{"role": "user", "content": "Question."}]
        self.turn = 0

    async def ask(self) -> int:
        """Take a turn, and return the number of cached tokens."""
        take = {"chat": self._chat, "messages": self._message}.get(self.route, self._respond)
        answer = await take()
        if self.turn % LOOP == LOOP - 1:
            self.messages.append({"role": "user", "content": "Another question."})
        self.turn += 1
        return answer

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        response = await self.server.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    async def _chat(self) -> int:
        tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
        answer = await self._post(
            "/v1/chat/completions", {"messages": self.messages, "max_tokens": 400, "tools": [tool]}
        )
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == f"Thought {self.turn}."
        self.messages.append(message)
        for call in message.get("tool_calls", ()):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "sun"})
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    async def _message(self) -> int:
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={self.turn * 7919:05x};"
        tool = {"name": "weather", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
        body = {"messages": self.messages, "max_tokens": 400, "tools": [tool]}
        answer = await self._post("/v1/messages", {**body, "system": [{"type": "text", "text": header}]})
        assert answer["content"][0]["thinking"] == f"Thought {self.turn}."
        self.messages.append({"role": "assistant", "content": answer["content"]})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "sun"}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        self.messages += [{"role": "user", "content": results}] if results else []
        cached: int = answer["usage"]["cache_read_input_tokens"]
        return cached

    async def _respond(self) -> int:
        tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
        body = {"input": self.messages, "tools": [tool], "previous_response_id": self.previous}
        packed = self.route == "packed responses"
        answer = await self._post("/v1/responses", body | {"include": ["reasoning.encrypted_content"] * packed})
        output = answer["output"]
        assert output[0].pop("content") == [{"type": "reasoning_text", "text": f"Thought {self.turn}."}]
        if not packed:
            output[0]["summary"] = [{"type": "summary_text", "text": f"Thought {self.turn}."}]
        if self.route == "stored responses":
            self.previous, self.messages = answer["id"], []
        else:
            self.messages += output
        calls = [item["call_id"] for item in output if item["type"] == "function_call"]
        self.messages += [{"type": "function_call_output", "call_id": name, "output": "sun"} for name in calls]
        cached: int = answer["usage"]["input_tokens_details"]["cached_tokens"]
        return cached


def rule(request: EngineRequest) -> Iterable[int]:
    """Write what comes in the turn that the prompt says."""
    text = "".join(chr(token) if token < 256 else SPECIAL[token - 256] for token in request.prompt_ids)
    return [*says(text.count("<|im_start|>assistant") - 1).encode(), END_ID]


ROUTES = ["chat", "messages", "responses", "packed responses", "stored responses"]


@pytest.mark.parametrize("route", ROUTES)
async def test_a_turn_finds_all_tokens_of_the_one_before_but_the_last_page(route: str) -> None:
    async with over_asgi(TEMPLATE, engine={"rule": rule, "cached_tokens": None, "max_model_len": 4096}) as server:
        agent = Agent(server, route)
        cached = [await agent.ask() for _ in range(10)]
    prompts = [request.prompt_ids for request in server.engine.submitted]
    known = [[*prompt, *says(turn).encode(), END_ID] for turn, prompt in enumerate(prompts)]
    for turn in range(1, 10):
        if turn == LOOP:  # the reasoning of the answers before is dropped: all from the first on is computed again
            begins = bytes(prompts[0][-len("<think>\n") :]).decode()
            assert begins == "<think>\n"
            kept = len(prompts[0]) - len(begins)
            assert prompts[turn][:kept] == known[0][:kept]
        else:
            kept = len(known[turn - 1]) - 1  # the last token of an answer is never computed
            assert prompts[turn][: kept + 1] == known[turn - 1], turn
        assert cached[turn] == kept // PAGE * PAGE, turn


async def test_all_routes_have_the_same_prompts() -> None:
    async with over_asgi(TEMPLATE, engine={"rule": rule, "max_model_len": 4096}) as server:
        for route in ROUTES:
            agent = Agent(server, route)
            for _ in range(10):
                await agent.ask()
    prompts = [request.prompt_ids for request in server.engine.submitted]
    assert [prompts[at : at + 10] for at in range(10, len(prompts), 10)] == [prompts[:10]] * (len(ROUTES) - 1)
