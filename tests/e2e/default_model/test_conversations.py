"""A conversation of ten turns over both chat routes: each turn finds all of the turn before in the prefix cache."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.process

PAGE = 16


def chat(http: httpx.Client, messages: list[dict[str, Any]]) -> tuple[str, int, int, int]:
    body = {"messages": messages, "max_tokens": 9, "temperature": 0}
    answer = http.post("/v1/chat/completions", json=body).json()
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], usage["prompt_tokens"], cached, usage["completion_tokens"]


def message(http: httpx.Client, messages: list[dict[str, Any]], nonce: int) -> tuple[str, int, int, int]:
    system = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={nonce:05x};"},
        {"type": "text", "text": messages[0]["content"], "cache_control": {"type": "ephemeral"}},
    ]
    body = {"system": system, "messages": messages[1:], "max_tokens": 9, "temperature": 0}
    answer = http.post("/v1/messages?beta=true", json=body).json()
    usage = answer["usage"]
    cached = usage["cache_read_input_tokens"]
    [block] = answer["content"]
    return block["text"], usage["input_tokens"] + cached, cached, usage["output_tokens"]


def test_each_turn_finds_the_one_before(server: ServerProcess) -> None:
    messages = [{"role": "system", "content": "You are a friendly agent that counts tokens. " * 4}]
    known = 0
    with httpx.Client(base_url=server.url, timeout=120) as http:
        for turn in range(10):
            messages.append({"role": "user", "content": f"Question {turn}: what comes next?"})
            text, prompt, cached, output = (
                chat(http, messages) if turn % 2 else message(http, messages, nonce=turn * 7919)
            )
            # The last token of an answer is never computed, and only whole pages are kept.
            assert cached >= (known - 1) // PAGE * PAGE, turn
            messages.append({"role": "assistant", "content": text})
            known = prompt + output
    assert cached > 200
