"""Bodies that clients sent for the second turn of a conversation, and what the model is shown of each.

They were recorded from the clients' own requests, and made small: texts are short, and ids, keys and the order of items
are the clients'. Reasoning for sending back, and ids of stored items, are put in as this server gives them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.server.anthropic.test_clients import prompt_of, writes_in_turn
from tests.server.conftest import over_asgi
from tests.server.openai.test_tools import CALL
from tests.server.responses_api.test_clients import SHOWS
from tests.server.responses_api.test_recorded_events import CUSTOM, HM, TOOLS

ULM = '{"city": "Ulm"}'
LOOKED = f"<think>Hm.</think> I look first. weather{ULM}"
SHOWN = {
    "agents-stream": (
        "tools: weather transfer_to_other\nsystem: Be short.\nuser: weather in Ulm?\n"
        f"assistant: {LOOKED.replace('Hm.', 'Hm.\nraw thought')}\ntool: sun in Ulm\n"
    ),
    "aisdk-custom-reference": 'tools: shell\nuser: x\nassistant:  shell{"input": "ls\\n"}\ntool: ran SELECT 1\n',
    "aisdk-not-stored": f"tools: weather\nsystem: Be short.\nuser: weather?\nassistant: {LOOKED}\ntool: sun\n",
    "aisdk-references": f"tools: weather\nsystem: Be short.\nuser: weather?\nassistant: {LOOKED}\ntool: sun\n",
    "codex": (
        "tools: exec_command apply_patch\n"
        "system: You are an agent.\nSkills: none.\nAll commands are permitted.\nuser: <cwd>/work</cwd>\nhi\n"
        'assistant: <think>Hm.</think> I look first. exec_command{"cmd": "echo hi; ls"}\ntool: Exit code: 0\nhi\n\n'
        "assistant: <think>raw thought</think>  apply_patch"
        '{"input": "*** Begin Patch\\n*** Add File: hello.txt\\n+hello\\n*** End Patch\\n"}\n'
        "tool: Exit code: 0\nDone.\n\n"
    ),
    "langchain-stream": f"tools: weather\nuser: weather?\nassistant: {LOOKED}\ntool: sun\n",
    "litellm-bridge": f"tools: weather\nsystem: Be short.\nuser: weather?\nassistant: {LOOKED}\ntool: sun\n",
    "pydantic-ai": (
        "tools: weather\nsystem: Be short.\nuser: weather?\n"
        f"assistant: {LOOKED.replace('Hm.', 'raw thought')}\ntool: sun\n"
    ),
}


@pytest.mark.parametrize("name", SHOWN)
async def test_what_the_model_is_shown(name: str):
    text = Path(__file__).with_name("recorded").joinpath(f"{name}.json").read_text()
    engine = writes_in_turn(f"{HM}I look first.\n{CUSTOM}\n{CALL}", "ok")
    model = json.loads(text)["model"]
    async with over_asgi(template=SHOWS, engine=engine, served_model_name=model) as server:
        first = await server.http.post("/v1/responses", json={"input": "hello", "tools": TOOLS})
        for item in first.json()["output"]:
            text = text.replace(f'"{item["id"].partition("_")[0]}_1"', f'"{item["id"]}"')
            if item["type"] == "custom_tool_call":
                text = text.replace('"call_2"', f'"{item["call_id"]}"')
        second = await server.http.post("/v1/responses", json=json.loads(text))
    assert second.status_code == 200, second.text
    assert prompt_of(server) == f"{SHOWN[name]}assistant:"
