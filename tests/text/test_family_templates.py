"""Templates with the features of the served families' own ones, against transformers, which these are written for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from jaxserve.errors import InvalidRequestError
from jaxserve.text.answers.formats import DEFAULT_CALLS
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.template_tools import described_in_text

FOLDER = Path(__file__).parent.parent / "fixtures" / "text" / "family_templates"
TEMPLATES = {file.stem: file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.jinja"))}
SPECIAL_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}
SYSTEM = {"role": "system", "content": "Be <b>brief</b> & kind. "}
TURNS = [
    {"role": "user", "content": " Was ist 2 + 2? "},
    {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\nVier.", "reasoning_content": " Easy. "},
    {"role": "user", "content": "Sicher? '\"你好"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Das Wetter – 天气",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
CONVERSATIONS = {
    "one turn": TURNS[:1],
    "turns": TURNS,
    "system": [SYSTEM, *TURNS],
    "answered": [SYSTEM, *TURNS[:2]],
    "no_think": [{"role": "system", "content": "Short. /no_think"}, *TURNS],
}
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "smollm3": [{"enable_thinking": False}, {"xml_tools": TOOLS}],
    "granite": [
        {"documents": [{"text": "eins"}, {"text": "zwei"}]},
        {"controls": {"length": "short"}, "add_generation_prompt": True},
    ],
    "command_r7b": [{"documents": [{"text": "<eins>"}, {"text": "zwei"}], "safety_mode": "strict"}],
    "exaone4": [{"enable_thinking": True}, {"enable_thinking": False, "skip_think": False}],
    "seed_oss": [{"thinking_budget": 0}, {"thinking_budget": 512}],
}
TEMPLATES_WITHOUT_TOOLS = {
    name for name, source in TEMPLATES.items() if "tools" not in source or name in ("command_r7b", "seed_oss")
}


def chat(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], SPECIAL_TOKENS)


def reference(name: str, messages: list[dict[str, Any]], **arguments: Any) -> str:
    [text], _ = render_jinja_template([messages], chat_template=TEMPLATES[name], **SPECIAL_TOKENS, **arguments)
    return str(text)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_rendered_as_by_transformers(name: str, conversation: str) -> None:
    messages = CONVERSATIONS[conversation]

    for arguments in [{}, {"tools": TOOLS}, *ARGUMENTS.get(name, [])]:
        prompted = {"add_generation_prompt": conversation != "answered"} | arguments
        rendered = chat(name).render(messages, **prompted)
        if name in TEMPLATES_WITHOUT_TOOLS and "tools" in arguments:
            assert rendered == reference(
                name, described_in_text(messages, prompted.pop("tools"), DEFAULT_CALLS.free), **prompted
            )
        elif "tools" in arguments and name == "smollm3":
            assert rendered == reference(name, messages, xml_tools=prompted.pop("tools"), **prompted)
        else:
            assert rendered == reference(name, messages, **prompted)
        assert messages[-1]["content"].split()[-1] in rendered
        assert "tools" not in arguments or '"weather"' in rendered or "'weather'" in rendered


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_content_of_parts_is_rendered_as_its_text(name: str) -> None:
    messages = CONVERSATIONS["system"]
    parts = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]

    assert chat(name).render(parts) == chat(name).render(messages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_image_is_refused_by_name(name: str) -> None:
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:,x"}}]

    with pytest.raises(InvalidRequestError, match="content parts of type 'image_url' are not supported"):
        chat(name).render([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("name", "messages", "fault", "message"),
    [
        ("gemma3", [TURNS[0], TURNS[0]], 1, "Turns must go user/assistant"),
        ("gemma3", [SYSTEM, SYSTEM, TURNS[0]], 1, "Turns must go user/assistant"),
        ("ministral", [TURNS[0], TURNS[0]], 1, "conversation roles must alternate"),
        ("ministral", [*TURNS[:2] * 3, TURNS[1], TURNS[0]], 6, "conversation roles must alternate"),
        ("ministral", [TURNS[0], {"role": "assistant", "content": "!x"}], 1, "An answer begins with a mark"),
        ("ministral", [TURNS[0], TURNS[1], SYSTEM], 2, "Only user and assistant roles are supported, got system"),
        ("exaone4", [{"role": "critic", "content": "x"}], 0, "Unknown role: critic"),
    ],
)
def test_a_conversation_that_the_template_refuses(
    name: str, messages: list[dict[str, Any]], fault: int, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=rf"refused messages\[{fault}\]: .*{message}") as caught:
        chat(name).render(messages)
    assert caught.value.param == f"messages[{fault}]"


def test_what_a_generation_block_sets_is_not_visible_after_it() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    [text], _ = render_jinja_template([TURNS], chat_template=source)

    assert ChatTemplate(source, {}).render(TURNS) == text == "21"
