"""The reasoning that clients send back reaches the template under the name that it reads."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.server.generation.chat_messages import _prepare

CALLS = [{"id": "t", "type": "function", "function": {"name": "f", "arguments": {}}}]
GPT_OSS = "{% if 'thinking' in message %}{{ message.thinking }}{% endif %}{{ reasoning_effort }}{{ message.content }}"
QWEN = "{% if message.reasoning_content is string %}{{ message.reasoning_content }}{% endif %}"


def answer(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "yes"} | fields


@pytest.mark.parametrize(
    ("source", "given", "expected"),
    [
        (QWEN, answer(reasoning="hm"), answer(reasoning="hm", reasoning_content="hm")),
        (QWEN, answer(reasoning_content="hm"), answer(reasoning_content="hm")),
        (QWEN, answer(), answer()),
        (GPT_OSS, answer(reasoning_content="hm"), answer(reasoning_content="hm", thinking="hm")),
        (
            GPT_OSS,
            answer(reasoning_content="hm", tool_calls=CALLS),
            answer(reasoning_content="hm", tool_calls=CALLS, content="", thinking="hm\n\nyes"),
        ),
        ("{{ message.content }}", answer(reasoning="hm"), answer(reasoning="hm")),
    ],
)
def test_reasoning_has_the_name_that_the_template_reads(
    source: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert _prepare(1, given, source) == expected
