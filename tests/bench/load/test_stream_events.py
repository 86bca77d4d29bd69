"""Events as real servers write them."""

from __future__ import annotations

import msgspec
import pytest

from jaxserve.bench.load.stream_events import decode_stream_chunk


@pytest.mark.parametrize(
    ("event", "said", "is_token"),
    [
        ('{"choices":[{"index":0,"text":" a","logprobs":null,"finish_reason":null}],"usage":null}', " a", True),
        ('{"choices":[{"text":"","finish_reason":null}]}', "", True),  # half a character
        ('{"choices":[{"text":"","finish_reason":"length"}]}', "", False),
        ('{"choices":[{"text":" z","finish_reason":"length"}]}', " z", True),
        ('{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}', "", False),
        ('{"choices":[{"delta":{"role":"assistant","content":null}}]}', "", False),
        ('{"choices":[{"delta":{"role":"assistant","content":"a"}}]}', "a", True),
        ('{"choices":[{"delta":{"content":"b"}}]}', "b", True),
        ('{"choices":[{"delta":{"reasoning_content":"hm"}}]}', "hm", True),
        ('{"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"{"}}]}}]}', "", True),
        ('{"choices":[{"delta":{},"finish_reason":"stop"}]}', "", False),
    ],
)
def test_what_counts_as_a_token(event: str, said: str, is_token: bool) -> None:
    (choice,) = decode_stream_chunk(event).choices
    assert (choice.new_text(), choice.is_token()) == (said, is_token)


def test_usage_alone_is_no_token() -> None:
    chunk = decode_stream_chunk('{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":9,"total_tokens":12}}')
    assert (chunk.choices, chunk.usage and chunk.usage.completion_tokens) == ([], 9)


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        ('{"error":{"message":"too long","code":400}}', "too long"),
        ('{"error":"too long"}', "too long"),
        ('{"object":"error","message":"too long","code":400}', "too long"),
        ('{"object":"text_completion","choices":[]}', None),
    ],
)
def test_faults(event: str, fault: str | None) -> None:
    assert decode_stream_chunk(event).error_text() == fault


def test_invalid_json_is_an_error() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_stream_chunk("{no")
