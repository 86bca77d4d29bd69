"""A server that drafts from the prompt, tried with the `openai` client: where answers end inside an accepted run."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.process

MODEL = "smollm2-135m-instruct"
PROMPT = "red green blue black white\n" * 6 + "red green"


def _accepted(server: ServerProcess) -> int:
    [replica] = httpx.get(f"{server.url}/server_info").json()["replicas"]
    accepted: int = replica["stats"]["accepted_tokens"]
    return accepted


def _streamed(client: openai.OpenAI, **options: object) -> tuple[str, str | None, int]:
    """Return the text, why it ended and the number of its tokens."""
    text, reason, tokens = "", None, 0
    with client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, stream=True, stream_options={"include_usage": True}, **options
    ) as stream:  # type: ignore[call-overload]
        for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].text
                reason = chunk.choices[0].finish_reason or reason
            if chunk.usage:
                tokens = chunk.usage.completion_tokens
    return text, reason, tokens


def test_answers_end_where_they_would_without_drafts(server: ServerProcess, client: openai.OpenAI) -> None:
    whole, reason, tokens = _streamed(client, max_tokens=60)
    assert (reason, tokens) == ("length", 60)
    before = _accepted(server)
    for place in range(20, 80, 13):
        stop = whole[place : place + 5]
        text, reason, _ = _streamed(client, max_tokens=60, stop=stop)
        assert (text, reason) == (whole[: whole.index(stop)], "stop")
    for most in range(1, 12):
        text, reason, tokens = _streamed(client, max_tokens=most)
        assert whole.startswith(text)
        assert (reason, tokens) == ("length", most)
    assert _accepted(server) > before, "these answers verify no drafts"


def test_samples_and_log_probabilities_of_drafted_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=40, n=2, logprobs=2)
    first, second = answer.choices
    assert first.text == second.text
    for choice in (first, second):
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == choice.text
        assert len(choice.logprobs.token_logprobs or []) == 40
        assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs or [])
