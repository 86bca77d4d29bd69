from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.cli.main import main
from jaxserve.text.output import OutputDelta

pytestmark = pytest.mark.slow

SAMPLING = ["--max-tokens", "4", "--ignore-eos", "--temperature", "0"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """The conversations sent to the model."""
    conversations: list[list[dict[str, str]]] = []
    encode = LLM.encode_chat

    def noted(self: LLM, messages: list[dict[str, str]]) -> list[int]:
        conversations.append([dict(message) for message in messages])
        return encode(self, messages)

    monkeypatch.setattr(LLM, "encode_chat", noted)
    return conversations


def chat(monkeypatch: pytest.MonkeyPatch, lines: str, *argv: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main(["chat", *argv])


def test_the_conversation_grows_until_it_is_cleared(tiny_flags, asked, monkeypatch, capsys) -> None:
    lines = "hi\n\nyo\n/clear\nhi\n/exit\nnever\n"
    assert chat(monkeypatch, lines, "--system", "be", *SAMPLING, *tiny_flags) == 0
    first, second, third = asked
    system, hi = {"role": "system", "content": "be"}, {"role": "user", "content": "hi"}
    assert first == third == [system, hi]
    answer = second[2]["content"]
    assert second == [system, hi, {"role": "assistant", "content": answer}, {"role": "user", "content": "yo"}]
    assert capsys.readouterr().out.startswith(answer + "\n")


def test_a_message_that_does_not_fit_is_an_error_and_the_chat_goes_on(tiny_flags, asked, monkeypatch, capsys) -> None:
    assert chat(monkeypatch, "x" * 100 + "\nhi\n", *SAMPLING, *tiny_flags) == 0
    assert asked[1] == [{"role": "user", "content": "hi"}]
    assert "/clear starts a new conversation" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_not_the_program(tiny_flags, asked, monkeypatch) -> None:
    stream = LLM.stream

    def interrupted(self: LLM, *arguments: object):
        deltas = stream(self, *arguments)
        if len(asked) == 1:
            yield next(deltas)
            signal.raise_signal(signal.SIGINT)
        yield from deltas

    monkeypatch.setattr(LLM, "stream", interrupted)
    assert chat(monkeypatch, "hi\nyo\n", *SAMPLING, *tiny_flags) == 0
    assert [message["role"] for message in asked[1]] == ["user", "assistant", "user"]


def test_the_models_options_hold_where_no_flag_is_given(tiny_flags, asked, monkeypatch) -> None:
    given: list[SamplingParams] = []

    def noted(self: LLM, ids: list[int], params: SamplingParams) -> Iterator[OutputDelta]:
        given.append(params)
        yield from ()

    monkeypatch.setattr(LLM, "stream", noted)
    override = ["--override-generation-config", '{"temperature": 0.3, "top_k": 5, "max_new_tokens": 6}']
    assert chat(monkeypatch, "hi\n", *override, *tiny_flags) == 0
    assert chat(monkeypatch, "hi\n", *override, "--top-k", "7", "--max-tokens", "4", *tiny_flags) == 0
    assert chat(monkeypatch, "hi\n", *tiny_flags) == 0
    assert [(one.temperature, one.top_k, one.max_tokens) for one in given] == [(0.3, 5, 6), (0.3, 7, 4), (0.7, 0, 44)]
