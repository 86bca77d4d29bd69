"""The sampling options that all APIs share come from `SamplingParams`."""

from __future__ import annotations

import msgspec
import pytest

from jaxserve.api_types import SHARED_OPTIONS, SamplingParams
from jaxserve.cli.bench.serve_flags import serve_parser
from jaxserve.cli.generate import parser
from jaxserve.errors import InvalidRequestError
from jaxserve.server.anthropic.protocol import MessagesRequest
from jaxserve.server.openai.protocol import ChatRequest, CompletionRequest
from jaxserve.server.responses_api.protocol import ResponsesRequest
from jaxserve.server.sglang.generate_protocol import GenerateSampling


@pytest.mark.parametrize("name", SHARED_OPTIONS)
@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest, MessagesRequest, ResponsesRequest, GenerateSampling])
def test_a_request_has_the_option_with_its_bounds(kind: type[msgspec.Struct], name: str):
    messages = [{"role": "user", "content": "a"}]
    needed = {
        CompletionRequest: {"prompt": "a"},
        ChatRequest: {"messages": messages},
        MessagesRequest: {"messages": messages, "max_tokens": 1},
        ResponsesRequest: {"input": "a"},
        GenerateSampling: {},
    }[kind]
    for value in (-3, 1000):
        try:
            SamplingParams(**{name: value})
        except InvalidRequestError:
            with pytest.raises(msgspec.ValidationError):
                msgspec.convert({**needed, name: value}, kind)
        else:
            assert getattr(msgspec.convert({**needed, name: value}, kind), name) == value
    assert getattr(msgspec.convert(needed, kind), name) is None


@pytest.mark.parametrize("name", SHARED_OPTIONS)
def test_the_option_is_a_flag_that_is_left_out_by_default(name: str):
    for flags in (parser(), serve_parser("")):
        flag = f"--{name.replace('_', '-')}"
        assert getattr(flags.parse_args([flag, "1"]), name) == 1
        assert flag in flags.format_help()
